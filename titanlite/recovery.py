"""What happens to a step that went wrong: stop, skip it, or roll back to the newest good checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Protocol

from titanlite.errors import TrainingStopped
from titanlite.optim.loss_scale import LossScale, Scaled

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.verdict import Verdict
    from titanlite.monitor import Monitor

MEAN_DECAY = 0.95
"""Weight of the past in the running mean that a spike is measured against."""


class Judged(Scaled, Protocol):
    """The part of the training state that judging keeps: it survives restarts and goes back with a rollback.

    Attributes:
        skips: steps given up so far.
        loss_mean: running mean of the loss, 0 before the first step.
    """

    skips: int
    loss_mean: float


class Recovery:
    """Judges each step's verdict; all ranks hold the same verdict, so they judge alike."""

    def __init__(self, config: Config, monitor: Monitor, loss_scale: LossScale):
        self.training = config.training
        self.monitor, self.loss_scale = monitor, loss_scale

    def judge(self, step: int, verdict: Verdict, state: Judged) -> Literal["update", "skip", "rollback"]:
        """What to do with ``step``; ``state`` takes note of it.

        Raises:
            TrainingStopped: the policy is to stop, or its skips are used up. The weights are still those before.
        """
        if self.loss_scale.overflowed(state, verdict.loss, verdict.grad_norm):
            self.monitor.event(step, "loss scale", f"gradients overflowed; the loss scale is {state.loss_scale:g} now")
            return "skip"
        wrong = self._wrong(verdict, state)
        if not wrong:
            past = state.loss_mean or verdict.loss
            state.loss_mean = MEAN_DECAY * past + (1 - MEAN_DECAY) * verdict.loss
            return "update"
        policy = self.training.on_nonfinite
        if policy == "stop":
            raise TrainingStopped(
                f"step {step}: {wrong}. The weights were not touched; lower optimizer.lr, or set "
                "training.on_nonfinite to skip or rollback"
            )
        if state.skips >= self.training.max_skips:
            raise TrainingStopped(
                f"step {step}: {wrong}, after {self.training.max_skips} steps given up already (training.max_skips)"
            )
        state.skips += 1
        self.monitor.event(step, policy, f"{wrong}; {policy} {state.skips} of {self.training.max_skips}")
        return policy

    def _wrong(self, verdict: Verdict, state: Judged) -> str:
        if verdict.tokens == 0:
            return "not one token of the batch counts"
        if not math.isfinite(verdict.loss):
            return f"the loss is {verdict.loss}"
        if not math.isfinite(verdict.grad_norm):
            return f"the gradient norm is {verdict.grad_norm}"
        threshold = self.training.spike_threshold
        if threshold is not None and state.loss_mean and verdict.loss > threshold * state.loss_mean:
            return f"the loss {verdict.loss:.4f} is over {threshold:g} times its running mean {state.loss_mean:.4f}"
        return ""
