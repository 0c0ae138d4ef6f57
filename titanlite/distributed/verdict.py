"""One small all-reduce a step, after which every rank knows the same and so does the same.

Stop signals, non-finite losses and the end of the data are each known to one rank first; a rank that acted on its own
would leave the others waiting in a collective. The logged loss travels in the same vector, so agreement costs nothing
extra.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.world import World


@dataclass(frozen=True)
class Verdict:
    """What all ranks know of a step before its optimizer step.

    Attributes:
        loss: mean over the counted tokens of the global batch, natural log.
        tokens: number of those tokens.
        grad_norm: global norm of the gradient of ``loss``, before clipping.
        stop: whether any rank was asked to stop.
        data_ended: whether any rank has no further batch.
        step_seconds_mean, step_seconds_spread: mean and standard deviation over the ranks of ``seconds``.
        slowest_rank, slowest_seconds: the rank whose ``seconds`` are most, and how many.
    """

    loss: float
    tokens: int
    grad_norm: float
    stop: bool
    data_ended: bool
    step_seconds_mean: float
    step_seconds_spread: float
    slowest_rank: int = 0
    slowest_seconds: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether loss and gradients may be stepped on."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def agree(
    world: World,
    loss_sum: Tensor | float,
    tokens: int,
    square_norm: Tensor | float,
    stop: bool,
    data_ended: bool,
    seconds: float,
    nominal_tokens: int,
) -> Verdict:
    """Sum every rank's knowledge; a collective over the whole world, and the only one of a step that is not the model's.

    ``loss_sum`` and ``tokens`` are zero on ranks whose equals already report them (tp) or that do not know them (pp).
    ``square_norm`` belongs to the gradient of the summed loss over ``nominal_tokens``; it is corrected to the tokens
    that did count. ``seconds`` is the time that this rank's step took before it first waited for others; each rank has
    a place of its own for it in the vector, 8 bytes a rank.
    """
    device = world.device
    places = [seconds if rank == world.rank else 0.0 for rank in range(world.size)]
    parts = [loss_sum, tokens, square_norm, stop, data_ended, torch.tensor(places, dtype=torch.float64)]
    vector = torch.cat([torch.as_tensor(part, dtype=torch.float64, device=device).view(-1) for part in parts])
    if world.size > 1:
        dist.all_reduce(vector)
    loss, counted, square, stops, ends, *times = vector.tolist()
    slowest = max(range(world.size), key=times.__getitem__)
    return Verdict(
        loss=loss / counted if counted else math.nan,
        tokens=int(counted),
        grad_norm=math.sqrt(square) * nominal_tokens / counted if counted and square >= 0 else math.nan,
        stop=stops > 0,
        data_ended=ends > 0,
        step_seconds_mean=statistics.fmean(times),
        step_seconds_spread=statistics.pstdev(times),
        slowest_rank=slowest,
        slowest_seconds=times[slowest],
    )
