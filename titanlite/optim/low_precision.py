"""AdamW with its two moments kept in bfloat16: 4 bytes a parameter instead of 8."""

from __future__ import annotations

import torch
from torch import Tensor


class AdamWLowPrecision(torch.optim.Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101) whose moments are stored in ``state_dtype``.

    Moments are widened to fp32, updated and rounded back one parameter at a time, so that no wide copy of all of them
    exists. The second moment's decay is slower than bfloat16's spacing: near its mean an update is rounded away, which
    is why this is an option and not the default.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float, state_dtype: torch.dtype):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)

    def _update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict) -> None:
        if not state:
            state |= initial_state(parameter, self.state_dtype, torch.device("cpu"))
        state["step"] += 1
        step = state["step"].item()
        first, second = group["betas"]
        mean = state["exp_avg"].float().lerp_(grad.float(), 1 - first)
        square = state["exp_avg_sq"].float().mul_(second).addcmul_(grad.float(), grad.float(), value=1 - second)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        root = square.div_(1 - second**step).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean.to(parameter.dtype), root.to(parameter.dtype), value=-group["lr"] / (1 - first**step))


def initial_state(parameter: Tensor, dtype: torch.dtype | None, step_device: torch.device) -> dict[str, Tensor]:
    """Adam's state before the first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=step_device),
        "exp_avg": torch.zeros_like(parameter, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype),
    }
