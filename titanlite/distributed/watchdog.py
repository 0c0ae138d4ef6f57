"""Ends a rank that makes no progress, after writing down where it stands.

A collective's own timeout tells who waited, never for whom. Each rank watches itself: without a beat for the time limit
it writes every thread's Python stack into the run's folder and ends, and torchrun ends the others.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.world import World

EXIT_CODE = 4
"""Exit code of a rank that the watchdog ended."""


class Watchdog:
    """A thread that waits for the next ``beat``; the first step may take ``comm.init_timeout_seconds``."""

    def __init__(self, config: Config, world: World, folder: Path):
        self.world = world
        self.file = folder / config.comm.save_traces_folder / f"{config.comm.save_traces_file_prefix}{world.rank}.txt"
        self.first, self.limit = config.comm.init_timeout_seconds, config.comm.train_timeout_seconds
        self.step = 0
        self.deadline = time.monotonic() + self.first
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def beat(self, step: int) -> None:
        """``step`` begins now."""
        limit = self.first if self.step == 0 else self.limit
        self.step = step
        self.deadline = time.monotonic() + limit

    def pause(self) -> None:
        """What follows may take as long as it takes, until the next beat."""
        self.deadline = float("inf")

    def close(self) -> None:
        """Stop watching."""
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(0.5):
            if time.monotonic() > self.deadline:
                self._end()

    def _end(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        who = f"rank {self.world.rank} on {socket.gethostname()}"
        with self.file.open("a") as file:
            file.write(f"{who} made no progress in step {self.step}\n")
            file.flush()
            faulthandler.dump_traceback(file)
        sys.__stderr__.write(  # type: ignore[union-attr]
            f"titanlite: {who} made no progress in step {self.step} within the time limit (comm.train_timeout_seconds); "
            f"where each of its threads stands is in {self.file}\n"
        )
        sys.__stderr__.flush()  # type: ignore[union-attr]
        os._exit(EXIT_CODE)
