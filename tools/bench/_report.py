"""What the benchmarks share: taking turns, medians, the JSON that scripts read and the table that people read."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable
from typing import Any


def in_turn(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> dict[str, float]:
    """Medians in seconds of two measurements taken A B A B, and their ratio."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return case([a for a, _ in pairs], [b for _, b in pairs])


def case(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """One case from both sides' samples; the ratio is the median of the rounds' ratios, which drift cancels out of."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ours": statistics.median(ours),
        "theirs": statistics.median(theirs),
        "ratio": statistics.median(ratios),
    }


def machine() -> dict[str, Any]:
    """Where the numbers were measured."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}


def report(cases: dict[str, dict[str, float]], as_json: bool, unit: str = "s") -> None:
    """Print the cases, as one JSON object or as a table."""
    if as_json:
        print(json.dumps({"machine": machine(), "cases": cases}, indent=1))
        return
    width = max(map(len, cases))
    print(f"{'case':{width}}  {'ours':>12}  {'theirs':>12}  {'ratio':>6}   ({unit})")
    for name, values in cases.items():
        print(f"{name:{width}}  {values['ours']:12.4g}  {values['theirs']:12.4g}  {values['ratio']:6.3f}")
