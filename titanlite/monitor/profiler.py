"""Traces and memory snapshots on the schedule of ``[profiling]``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.world import World

SNAPSHOT_ENTRIES = 100_000


class Profiler:
    """Writes Chrome traces as ``profile_traces/step_N/rank_R.json``, and snapshots of the CUDA allocator's history."""

    def __init__(self, config: Config, world: World, folder: Path):
        settings = config.profiling
        self.world, self.folder, self.settings = world, folder, settings
        here = not settings.ranks or world.rank in settings.ranks
        self.trace: profile | None = None
        self.steps = 0
        if settings.enable_profiling and here:
            wait = max(settings.profile_freq - settings.profiler_active - settings.profiler_warmup, 0)
            plan = schedule(wait=wait, warmup=settings.profiler_warmup, active=settings.profiler_active)
            activities = [ProfilerActivity.CPU]
            if world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.trace = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
            self.trace.start()
        self.snapshots = settings.enable_memory_snapshot and here and world.device.type == "cuda"
        if self.snapshots:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)

    def step(self) -> None:
        """A training step has ended."""
        self.steps += 1
        if self.trace is not None:
            self.trace.step()
        if self.snapshots and self.steps % self.settings.profile_freq == 0:
            self._snapshot()

    def close(self) -> None:
        """Stop recording."""
        if self.trace is not None:
            self.trace.stop()
        if self.snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, trace: profile) -> None:
        folder = self.folder / self.settings.save_traces_folder / f"step_{self.steps + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"rank_{self.world.rank}.json"))

    def _snapshot(self) -> None:
        folder = self.folder / self.settings.save_memory_snapshot_folder / f"step_{self.steps}"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank_{self.world.rank}.pickle", "wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file)
