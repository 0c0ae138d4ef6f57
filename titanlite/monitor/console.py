"""What a person sees: a summary at the start, an aligned line a step, paths at the end."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Plain lines, and below them a progress bar where standard output is a terminal."""

    def __init__(self, steps: int, color: bool):
        self.steps = steps
        self.terminal = Terminal(file=sys.stdout, no_color=not color, highlight=False, soft_wrap=True)
        self.progress: Progress | None = None
        if self.terminal.is_terminal:
            columns = (TextColumn("step"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
            self.progress = Progress(*columns, console=self.terminal)
            self.task = self.progress.add_task("", total=steps)

    def start(self, step: int, facts: dict[str, Any]) -> None:
        """The facts of the run, a line each."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.say(f"{name:{width}}  {value}")
        if self.progress is not None:
            self.progress.start()
            self.progress.update(self.task, completed=step)

    def step(self, line: dict[str, Any]) -> None:
        """A step's line."""
        width = len(str(self.steps))
        parts = [
            f"step {line['step']:{width}}",
            f"loss {line['loss']:8.4f}",
            f"grad norm {line['grad_norm']:8.4f}",
            f"lr {line['lr']:.2e}",
            f"tokens/s/device {line['tokens_per_second_per_device']:9,.0f}",
            f"mfu {line['mfu']:5.1f}%" if "mfu" in line else f"tflops {line['tflops_per_device']:6.2f}",
            f"memory {line['memory_peak_gib']:6.2f} GiB",
            f"data wait {100 * line['data_wait_seconds'] / line['step_seconds']:4.1f}%",
            f"eta {duration(line['eta_seconds'])}",
        ]
        if "validation_loss" in line:
            parts.append(f"validation loss {line['validation_loss']:.4f}")
        self.say("  ".join(parts))
        if self.progress is not None:
            self.progress.update(self.task, completed=line["step"])

    def say(self, text: str) -> None:
        """A line of text."""
        self.terminal.print(text, markup=False)

    def close(self) -> None:
        """Take the progress bar away."""
        if self.progress is not None:
            self.progress.stop()


def duration(seconds: float) -> str:
    """Seconds as 1:02:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
