"""AdamW over sharded parameters, and its state by parameter name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from titanlite.config import Config


class Optimizers:
    """The optimizer of all of this rank's model parts.

    Attributes:
        named: the parameters by fully qualified name; pipeline stages hold disjoint names.
    """

    def __init__(self, parts: list[nn.Module], config: Config):
        self.named: dict[str, nn.Parameter] = {
            name: parameter for part in parts for name, parameter in part.named_parameters()
        }
        settings = config.optimizer
        self.lr = settings.lr
        how = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
        self.optimizer = torch.optim.AdamW(
            list(_groups(self.named, settings.weight_decay, settings.decay_embeddings)),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            **how[settings.implementation],
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter of this rank."""
        return iter(self.named.values())

    def step(self, factor: float) -> None:
        """Update the parameters with ``factor`` times the configured learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * factor
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def named_state(self) -> dict[str, Tensor]:
        """The live state tensors as "name.key".

        State that does not exist yet is made as it is before the first step: torch's own way to get it takes a step on
        zero gradients, which leaves the step count at 1 and changes the first updates.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named.items():
            state = self.optimizer.state[parameter]
            if not state:
                device = parameter.device if self.optimizer.defaults["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        return tensors


def _groups(named: dict[str, nn.Parameter], weight_decay: float, decay_embeddings: bool) -> Iterator[dict]:
    """Parameter groups: norms do not decay; fused and foreach AdamW take only tensors of one kind and mesh together."""
    groups: dict[tuple, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        decays = parameter.ndim > 1 and (decay_embeddings or not name.startswith(("tok_embeddings", "output")))
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((decays, mesh), []).append(parameter)
    for (decays, _), parameters in groups.items():
        yield {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
