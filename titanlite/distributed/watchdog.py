"""Ends a rank that makes no progress, after writing down where it stands.

A collective's own timeout tells who waited, never for whom. Each rank watches itself: without a beat for the time limit
it writes every thread's Python stack into the run's folder and ends, and torchrun ends or restarts the others.
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

from titanlite.distributed import private

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.world import World

EXIT_CODE = 4
"""Exit code of a rank that the watchdog ended."""

WAITING = ("torch/distributed/", "titanlite/distributed/verdict.py")
"""Files whose functions wait for other ranks."""


class Watchdog:
    """A thread that expects the next ``beat`` in time.

    A step may take ``comm.train_timeout_seconds``, the first one ``comm.init_timeout_seconds``: it compiles. Nothing is
    expected before the first beat and after a pause, where collectives have limits of their own.
    """

    def __init__(self, config: Config, world: World, folder: Path):
        self.world = world
        self.file = folder / config.comm.save_traces_folder / f"{config.comm.save_traces_file_prefix}{world.rank}.txt"
        self.first, self.later = config.comm.init_timeout_seconds, config.comm.train_timeout_seconds
        self.main = threading.get_ident()
        self.step = 0
        self.limit, self.deadline = float(self.first), float("inf")
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def beat(self, step: int) -> None:
        """``step`` begins now."""
        self.limit = self.first if self.step == 0 else self.later
        self.step = step
        self.deadline = time.monotonic() + self.limit

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
        who = f"rank {self.world.rank} on {socket.gethostname()}"
        waiting = self._waits_for_others()
        what = "waits for other ranks" if waiting else "hangs"
        try:
            self._write(f"{who} {what} in step {self.step}\n")
            where = f"where each of its threads stands is in {self.file}"
        except OSError as error:
            where = f"where it stands could not be written: {error}"
        # Thousands of ranks may wait for one: those that are quiet stay so, the one that hangs is heard.
        voice = sys.stderr if waiting else sys.__stderr__
        if voice is not None:
            print(
                f"titanlite: {who} {what} in step {self.step}, for over {self.limit} s; {where}", file=voice, flush=True
            )
        os._exit(EXIT_CODE)

    def _waits_for_others(self) -> bool:
        """Whether the main thread stands in a collective rather than in work of its own."""
        frame = sys._current_frames().get(self.main)
        for _ in range(4):
            if frame is None:
                return False
            if any(part in frame.f_code.co_filename for part in WAITING):
                return True
            frame = frame.f_back
        return False

    def _write(self, title: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(title)
            file.flush()
            faulthandler.dump_traceback(file)
        if self.world.device.type == "cuda":
            self.file.with_suffix(".pickle").write_bytes(private.flight_record())
