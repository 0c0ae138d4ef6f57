"""Python's garbage collection at fixed steps, so that no rank pauses alone in the middle of a step.

A rank that collects when it happens to be due makes all others wait in the next collective.
"""

from __future__ import annotations

import gc


class GarbageCollection:
    """Turns automatic collection off; collects the young generations every ``every`` steps, on all ranks together."""

    def __init__(self, every: int):
        self.every = every
        self.was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()

    def step(self, step: int) -> None:
        """Collect where ``step`` is due."""
        if step and step % self.every == 0:
            gc.collect(1)

    def close(self) -> None:
        """Give the interpreter its own way back."""
        if self.was_enabled:
            gc.enable()
