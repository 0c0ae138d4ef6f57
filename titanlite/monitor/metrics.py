"""What is measured of the steps between two logged lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from titanlite.models.sizes import DecoderSizes
from titanlite.monitor import memory
from titanlite.monitor.flops import flops_per_token, peak_flops

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.verdict import Verdict
    from titanlite.distributed.world import World

Line = dict[str, Any]
"""A line of metrics.jsonl: names and numbers; the names are TensorBoard's tags too."""


class Meter:
    """The clocks of this rank.

    Seconds are means over the steps since the last line, tokens a second come from all the time between, so that
    stalls count.
    """

    def __init__(self, config: Config, world: World, sizes: DecoderSizes):
        self.world = world
        self.steps = config.training.steps
        self.flops = flops_per_token(sizes, config.training.seq_len)
        self.peak = peak_flops(world.device)
        self.total_memory = memory.total_bytes(world.device)
        self.line_began = self.step_began = time.perf_counter()
        self.data = self.stall = 0.0
        self.counted = self.tokens = 0
        self.waited = self.own = 0.0
        self.mean_step: float | None = None

    def step_begins(self) -> None:
        """A step begins now."""
        self.step_began = time.perf_counter()
        self.waited = 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """What happens inside is waiting for the loader."""
        began = time.perf_counter()
        yield
        self.waited = time.perf_counter() - began
        self.data += self.waited
        self.own = time.perf_counter() - self.step_began

    def own_seconds(self) -> float:
        """How long the step took this rank before it first waited for others: its data, its host, injected delays.

        Later the ranks go in step through the collectives of the model, and a slow one cannot be told from outside.
        """
        return self.own

    def step_ends(self, verdict: Verdict) -> None:
        """A step has ended."""
        self.counted += 1
        self.tokens += verdict.tokens
        if self.counted == 1 and self.mean_step is None:
            memory.reset(self.world.device)

    def first_step_seconds(self) -> float | None:
        """How long the step that has just ended took, where it was the first of this process."""
        first = self.counted == 1 and self.mean_step is None
        return time.perf_counter() - self.step_began if first else None

    def checkpoint_stalled(self, seconds: float) -> None:
        """Training waited for a checkpoint."""
        self.stall += seconds

    def summary(self, step: int, data_step: int, tokens_seen: int, verdict: Verdict, lr: float) -> Line:
        """The line of a step, by the contract's names; the clocks begin anew."""
        now = time.perf_counter()
        elapsed, count = now - self.line_began, max(self.counted, 1)
        rate = self.tokens / elapsed
        a_device = rate / self.world.size
        self.mean_step = elapsed / count
        peak = memory.peak_bytes(self.world.device)
        line: Line = {
            "step": step,
            "data_step": data_step,
            "loss": verdict.loss,
            "grad_norm": verdict.grad_norm,
            "lr": lr,
            "tokens_seen": tokens_seen,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": a_device,
            "tflops_per_device": a_device * self.flops / 1e12,
            "step_seconds": self.mean_step,
            "data_wait_seconds": self.data / count,
            "checkpoint_stall_seconds": self.stall,
            "memory_peak_gib": peak / 2**30,
            "memory_peak_percent": 100 * peak / self.total_memory,
            "eta_seconds": self.mean_step * max(self.steps - step, 0),
            "time": time.time(),
            "rank_seconds_spread": verdict.step_seconds_spread,
            "slowest_rank": verdict.slowest_rank,
            "slowest_rank_lag_seconds": verdict.slowest_seconds - verdict.step_seconds_mean,
        }
        if self.peak is not None:
            line["mfu"] = 100 * a_device * self.flops / self.peak
        self.line_began, self.data, self.stall, self.counted, self.tokens = now, 0.0, 0.0, 0, 0
        memory.reset(self.world.device)
        return line
