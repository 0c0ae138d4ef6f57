"""Requests to stop: signals, a wall-clock budget, and the marker that a launcher reads afterwards."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.world import World

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
MARKER = "stopped.json"


class StopRequest:
    """Whether this rank was asked to stop: by a signal, or because ``job.max_minutes`` are used up.

    The request is only noted; the step's verdict carries it to all ranks, the step is finished and the state saved. A
    second signal changes nothing, so it cannot break the saving that the first one asked for.
    """

    def __init__(self, config: Config):
        self.reason = ""
        minutes = config.job.max_minutes
        self.deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}

    @property
    def requested(self) -> str:
        """Why to stop, or "" to go on."""
        if not self.reason and self.deadline is not None and time.monotonic() > self.deadline:
            self.reason = "the time of job.max_minutes is used up"
        return self.reason

    def _note(self, number: int, frame: object) -> None:
        self.reason = self.reason or signal.Signals(number).name

    def close(self) -> None:
        """Give the signals back to whoever handled them before.

        One that would end the process is only noted from now on too: torchrun sends SIGTERM to the ranks that a lost one
        left behind, while they are saying what happened.
        """
        for number, handler in self.before.items():
            if handler is not signal.SIG_DFL:
                signal.signal(number, handler)


def write_marker(folder: Path, reason: str, step: int, world: World) -> None:
    """Leave word that the run was stopped on request with its state saved: a launcher may start it again."""
    if world.rank == 0:
        staged = folder / f"{MARKER}.tmp"
        staged.write_text(json.dumps({"reason": reason or "another rank was asked", "step": step, "time": time.time()}))
        os.replace(staged, folder / MARKER)


def clear_marker(folder: Path, world: World) -> None:
    """Take the marker of an earlier stop away: this run has begun."""
    if world.rank == 0:
        (folder / MARKER).unlink(missing_ok=True)
