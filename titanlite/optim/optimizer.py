"""The optimizers over sharded parameters, and their state by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.optim import gradients
from titanlite.optim.low_precision import AdamWLowPrecision, initial_state

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.config.schema import Optimizer

Named = dict[str, nn.Parameter]


class Optimizers:
    """The optimizers of all of this rank's model parts.

    AdamW or Adam for every parameter; or Muon (https://kellerjordan.github.io/posts/muon) for the blocks' matrices and
    AdamW for the rest. Muon sees whole matrices: on DTensors its products gather what they need.

    Attributes:
        named: the parameters by fully qualified name; pipeline stages hold disjoint names.
    """

    def __init__(self, parts: list[nn.Module], config: Config):
        self.named: Named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        self.settings = config.optimizer
        self.optimizers = [self._make(named) for named in self._shares()]
        self.early_square_norm: Tensor | None = None
        if self.settings.early_step_in_backward:
            self._step_in_backward()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter of this rank."""
        return iter(self.named.values())

    def begin(self, factor: float) -> None:
        """Drop the gradients of the step before, and set the learning rate to ``factor`` times the configured one."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.lr * factor
            optimizer.zero_grad(set_to_none=True)
        self.early_square_norm = None

    def square_norm(self, replicas: int) -> Tensor | float:
        """This rank's part of the squared gradient norm; see ``gradients.square_norm``."""
        if self.settings.early_step_in_backward:
            return 0.0 if self.early_square_norm is None else self.early_square_norm / replicas
        return gradients.square_norm(self.parameters(), replicas)

    def step(self) -> None:
        """Update the parameters; those stepped during the backward pass have no gradient any more."""
        if not self.settings.early_step_in_backward:
            for optimizer in self.optimizers:
                optimizer.step()

    @torch.no_grad()
    def named_state(self) -> dict[str, Tensor]:
        """The live state tensors as "name.key".

        State that does not exist yet is made as it is before the first step: torch's own way to get it takes a step on
        zero gradients, which leaves the step count at 1 and changes the first updates.
        """
        tensors: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            for name, parameter in self.named.items():
                if parameter in mine:
                    state = optimizer.state[parameter]
                    if not state:
                        state |= _state_before_the_first_step(optimizer, parameter)
                    tensors |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        return tensors

    def _shares(self) -> list[Named]:
        """The parameters of each optimizer: one a parameter where they step in the backward pass."""
        if self.settings.early_step_in_backward:
            return [{name: parameter} for name, parameter in self.named.items()]
        if self.settings.name != "Muon":
            return [self.named]
        matrices = {name: p for name, p in self.named.items() if name.startswith("layers.") and p.ndim == 2}
        return [matrices, {name: p for name, p in self.named.items() if name not in matrices}]

    def _make(self, named: Named) -> torch.optim.Optimizer:
        s = self.settings
        groups: Any = list(_groups(named, s))
        betas = (s.beta1, s.beta2)
        is_matrices = s.name == "Muon" and all(name.startswith("layers.") and p.ndim == 2 for name, p in named.items())
        if is_matrices:
            # Muon's updates are scaled to the size of AdamW's, so that one learning rate serves both.
            return torch.optim.Muon(
                groups, lr=s.lr, momentum=s.beta1, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        if s.state_dtype == "bfloat16":
            return AdamWLowPrecision(groups, s.lr, betas, s.eps, torch.bfloat16)
        how: dict[str, Any] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
        kind = torch.optim.Adam if s.name == "Adam" else torch.optim.AdamW
        return kind(groups, lr=s.lr, betas=betas, eps=s.eps, **how[s.implementation])

    def _step_in_backward(self) -> None:
        for optimizer in self.optimizers:
            (parameter,) = optimizer.param_groups[0]["params"]

            def update(parameter: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
                grad = parameter.grad
                if (
                    isinstance(parameter, DTensor)
                    and isinstance(grad, DTensor)
                    and grad.placements != parameter.placements
                ):
                    # Of a norm under tensor parallelism without FSDP each rank has its own share's gradient only.
                    parameter.grad = grad.redistribute(placements=parameter.placements)
                # Each piece counts by its own number of copies; ``square_norm`` divides by the number of ranks.
                pieces = gradients.pieces(parameter)
                square = gradients.square_norm([parameter], pieces) * pieces
                before = self.early_square_norm
                self.early_square_norm = square if before is None else before + square
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            parameter.register_post_accumulate_grad_hook(update)


def _state_before_the_first_step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    if isinstance(optimizer, AdamWLowPrecision):
        return initial_state(parameter, optimizer.state_dtype, torch.device("cpu"))
    device = parameter.device if optimizer.defaults["fused"] else torch.device("cpu")
    return initial_state(parameter, None, device)


def _groups(named: Named, settings: Optimizer) -> Iterable[dict[str, Any]]:
    """Parameter groups: norms do not decay; fused and foreach AdamW take only tensors of one kind and mesh together."""
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        decays = parameter.ndim > 1 and (settings.decay_embeddings or name.startswith("layers."))
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((decays, mesh), []).append(parameter)
    for (decays, _), parameters in groups.items():
        yield {"params": parameters, "weight_decay": settings.weight_decay if decays else 0.0}
