"""Dynamic loss scale for float16 gradients (https://arxiv.org/abs/1710.03740, section 3.2).

float16 loses gradients below 6e-8. The loss is multiplied before the backward pass and the gradients divided before they
are clipped. The step's verdict carries the gradient norm of all ranks, so all of them grow and shrink alike, whatever the
layout; the scale is part of the training state.
"""

from __future__ import annotations

import math
from typing import Protocol

GROWTH_INTERVAL = 1000
"""Good steps until the scale doubles."""

INITIAL = 2.0**16
SMALLEST = 1.0


class Scaled(Protocol):
    """The part of the training state that a loss scale keeps."""

    loss_scale: float
    good_steps: int


class LossScale:
    """The scale of a run; 1 and fixed unless weights compute in float16."""

    def __init__(self, active: bool):
        self.active = active

    def initial(self) -> float:
        """The scale that a run begins with."""
        return INITIAL if self.active else 1.0

    def overflowed(self, state: Scaled, loss: float, grad_norm: float) -> bool:
        """Whether this step's gradients overflowed by the scale alone; moves the scale.

        A loss that is not finite itself, or a scale that cannot shrink further, is no matter of the scale.
        """
        if not self.active:
            return False
        if math.isfinite(grad_norm):
            state.good_steps += 1
            if state.good_steps % GROWTH_INTERVAL == 0:
                state.loss_scale *= 2
            return False
        if not math.isfinite(loss) or state.loss_scale <= SMALLEST:
            return False
        state.loss_scale = max(state.loss_scale / 2, SMALLEST)
        state.good_steps = 0
        return True
