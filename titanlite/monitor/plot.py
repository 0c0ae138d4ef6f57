"""Curves as text for a terminal, and as SVG for a page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping

from titanlite.monitor.runs import Curve

MARKS = "\u2022\u00d7+o"
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706")


def text(curves: Mapping[str, Curve], title: str, width: int = 72, height: int = 14) -> str:
    """Points on a grid of characters, a mark a curve, with the range on the axes."""
    points = _finite(curves)
    if not any(points.values()):
        return f"{title}: nothing to draw"
    left, right, low, high = _bounds(points)
    grid = [[" "] * width for _ in range(height)]
    for mark, curve in zip(MARKS, points.values(), strict=False):
        for step, value in curve:
            column = round((step - left) / (right - left) * (width - 1))
            row = round((high - value) / (high - low) * (height - 1))
            grid[row][column] = mark if grid[row][column] in (" ", mark) else "*"
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(MARKS, points, strict=False))
    lines = [f"{title}   {legend}"]
    lines += [f"{label:>{margin}} \u2502{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    lines.append(" " * margin + " \u2514" + "\u2500" * width)
    lines.append(" " * margin + f"  {left:<{width // 2}}{right:>{width - width // 2}}")
    return "\n".join(lines)


def svg(curves: Mapping[str, Curve], title: str, width: int = 560, height: int = 260) -> str:
    """A line chart that needs nothing beside itself."""
    points = _finite(curves)
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}">']
    parts.append(f'<text x="60" y="20" class="title">{html.escape(title)}</text>')
    if any(points.values()):
        left, right, low, high = _bounds(points)

        def x(step: float) -> float:
            return 60 + (step - left) / (right - left) * (width - 80)

        def y(value: float) -> float:
            return 34 + (high - value) / (high - low) * (height - 64)

        for value in (high, (high + low) / 2, low):
            parts.append(f'<line x1="60" x2="{width - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="grid"/>')
            parts.append(f'<text x="54" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        for step, anchor in ((left, "start"), (right, "end")):
            parts.append(f'<text x="{x(step):.1f}" y="{height - 10}" text-anchor="{anchor}">{step:g}</text>')
        for i, (name, curve) in enumerate(points.items()):
            path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[i % 4]}" stroke-width="1.8"/>')
            if len(points) > 1:
                parts.append(
                    f'<text x="{width - 24}" y="{20 + 14 * i}" text-anchor="end" fill="{COLORS[i % 4]}">{html.escape(name)}</text>'
                )
    return "".join([*parts, "</svg>"])


def _finite(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    return {name: [(s, v) for s, v in curve if math.isfinite(v)] for name, curve in curves.items()}


def _bounds(points: Mapping[str, Curve]) -> tuple[float, float, float, float]:
    steps = [step for curve in points.values() for step, _ in curve]
    values = [value for curve in points.values() for _, value in curve]
    left, right, low, high = min(steps), max(steps), min(values), max(values)
    return left, right if right > left else left + 1, low if high > low else low - 1, high if high > low else high + 1
