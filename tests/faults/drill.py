"""A small run from outside, and waiting for what it does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.command import read_metrics

STEPS = 24
FLAGS = (
    "--model.n_layers=1",
    "--model.dim=32",
    "--model.n_heads=2",
    "--training.seq_len=16",
    "--training.global_batch_size=4",
    "--training.local_batch_size=1",
    "--training.mixed_precision_param=float32",
    f"--training.steps={STEPS}",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--metrics.no-enable_tensorboard",
    "--checkpoint.interval=5",
)


def slow(seconds: float, *more: str) -> str:
    """A flag that makes every step take at least ``seconds``, so that what happens from outside meets a run under way."""
    return "--debug.faults=" + ",".join([*(f"slow@{step}:0:{seconds}" for step in range(1, STEPS + 1)), *more])


def last_step(folder: Path) -> int:
    """The last step that a run has logged."""
    return max((line["step"] for line in read_metrics(folder)), default=0)


def until(what: Callable[[], Any], seconds: float = 150) -> None:
    """Wait for something."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def curve(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every line."""
    return [(line["step"], line["loss"]) for line in read_metrics(folder) if "loss" in line]


def marker(folder: Path) -> dict[str, Any] | None:
    """What a run that was stopped on request left behind."""
    file = folder / "stopped.json"
    return json.loads(file.read_text()) if file.exists() else None


def workers(launcher: int) -> list[int]:
    """The processes that a launcher started."""
    tasks = Path(f"/proc/{launcher}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
