"""The learning rate as a pure function of the step: warm-up, stable, decay.

    factor
      1 |      ________________
        |    /                 \
        |  /                     \___ min_lr_factor
        +-------------------------------> step
         warmup      stable      decay
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.config import Config


def lr_factor(step: int, config: Config) -> float:
    """What ``optimizer.lr`` is multiplied by in optimizer step ``step``, the first being 1.

    The warm-up rises linearly and reaches 1 in step ``warmup_steps``. The decay ends at ``min_lr_factor`` one step
    after the last, so that no step is lost to a factor of zero. Without ``decay_ratio`` the decay starts right after
    the warm-up. ``total_steps`` fixes the schedule's length apart from ``training.steps``.
    """
    schedule = config.lr_scheduler
    total = schedule_length(config)
    warmup = min(schedule.warmup_steps, total)
    if step <= warmup:
        return step / warmup
    decay = total - warmup if schedule.decay_ratio is None else round(total * schedule.decay_ratio)
    decay = min(decay, total - warmup)
    past = step - 1 - (total - decay)
    if past <= 0 or decay == 0:
        return 1.0
    progress = min(past / decay, 1.0)
    shape = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[schedule.decay_type]
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * shape


def schedule_length(config: Config) -> int:
    """Number of steps that the schedule spans."""
    return config.lr_scheduler.total_steps or config.training.steps
