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

    Each strikes once: a step that is taken again after a rollback is spared. kill and hang strike the first attempt
    only, so that a restarted run gets past them.
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
        for kind, seconds in self._take(step, "kill", "hang", "slow"):
            if kind == "kill":
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "hang":
                time.sleep(10**6)
            elif kind == "slow":
                time.sleep(seconds)

    def corrupt(self, step: int, loss: Tensor) -> Tensor:
        """The loss of ``step``, or nan where that is this rank's fault."""
        return loss * float("nan") if self._take(step, "nan") else loss

    def _take(self, step: int, *kinds: str) -> list[tuple[str, float]]:
        """The faults of ``kinds`` that are due, which will not strike again."""
        due = self.by_step.get(step, [])
        taken = [fault for fault in due if fault[0] in kinds]
        for fault in taken:
            due.remove(fault)
        return taken
