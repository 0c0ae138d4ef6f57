"""A run's metrics.jsonl, read back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.errors import UserError

Curve = list[tuple[int, float]]


@dataclass
class Run:
    """What a run logged.

    Attributes:
        lines: a line a logged step, ascending; of a step that came twice the later.
        validation: validation losses by step.
        events: what happened, as (step, kind, text).
    """

    folder: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    validation: Curve = field(default_factory=list)
    events: list[tuple[int, str, str]] = field(default_factory=list)


@dataclass
class Compared:
    """Two curves beside each other, over the steps that both have."""

    steps: list[int]
    parted_at: int | None
    largest: float
    largest_at: int


def read(path: Path) -> Run:
    """The run in a folder, or of a metrics.jsonl; a half-written last line is passed over.

    Raises:
        UserError: there is none, or it logged no step.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        raise UserError(
            f"{path} has no metrics.jsonl: it is no run's folder, or the run has not logged a step"
        ) from None
    run = Run(file.parent)
    by_step: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if "event" in values:
            run.events.append((values["step"], values["event"], values.get("text", "")))
        else:
            by_step[values["step"]] = values
    run.lines = [by_step[step] for step in sorted(by_step)]
    run.validation = curve(run, "validation_loss")
    if not run.lines:
        raise UserError(f"{file} has no step yet")
    return run


def curve(run: Run, key: str) -> Curve:
    """The values of a key by step."""
    return [(line["step"], line[key]) for line in run.lines if isinstance(line.get(key), int | float)]


def compare(a: Run, b: Run, key: str, tolerance: float) -> Compared:
    """Where two runs part.

    Raises:
        UserError: they have no step with ``key`` in common.
    """
    first, second = dict(curve(a, key)), dict(curve(b, key))
    steps = sorted(first.keys() & second.keys())
    if not steps:
        known = sorted({name for line in a.lines for name in line})
        raise UserError(f"no step of both runs has {key!r}; {a.folder} has {', '.join(known)}")
    differences = {step: _relative(first[step], second[step]) for step in steps}
    parted = next((step for step in steps if not differences[step] <= tolerance), None)
    worst = max(steps, key=lambda step: math.inf if math.isnan(differences[step]) else differences[step])
    return Compared(steps, parted, differences[worst], worst)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0
