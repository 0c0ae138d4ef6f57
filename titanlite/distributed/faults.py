"""Faults made on purpose, for drills: ``debug.faults``."""

from __future__ import annotations

import os
import signal
import sys
import time

from torch import Tensor

from titanlite.distributed.world import World


class Faults:
    """The faults that strike this rank, by step: nan, kill, hang, slow.

    kill and hang strike the first attempt only, so that a restarted run gets past them.
    """

    def __init__(self, specs: list[str], world: World):
        self.by_step: dict[int, list[tuple[str, float]]] = {}
        for spec in specs:
            kind, _, rest = spec.partition("@")
            step, rank, *seconds = rest.split(":")
            first_attempt_only = kind in ("kill", "hang")
            if int(rank) == world.rank and not (first_attempt_only and world.restart > 0):
                self.by_step.setdefault(int(step), []).append((kind, float(seconds[0]) if seconds else 0.0))

    def before_step(self, step: int) -> None:
        """Strike at the beginning of ``step``."""
        for kind, seconds in self.by_step.get(step, ()):
            if kind == "kill":
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "hang":
                time.sleep(10**6)
            elif kind == "slow":
                time.sleep(seconds)

    def corrupt(self, step: int, loss: Tensor) -> Tensor:
        """The loss of ``step``, or nan where that is this rank's fault."""
        struck = any(kind == "nan" for kind, _ in self.by_step.get(step, ()))
        return loss * float("nan") if struck else loss
