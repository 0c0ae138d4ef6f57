"""A run as a terminal view and as one self-contained HTML page."""

from __future__ import annotations

import html
import time
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from titanlite.checkpoint import choice
from titanlite.checkpoint import manifest as manifests
from titanlite.monitor import plot
from titanlite.monitor.console import duration
from titanlite.monitor.runs import Run, curve

CURVES = {
    "loss": ("loss",),
    "gradient norm": ("grad_norm",),
    "tokens a second": ("tokens_per_second",),
    "learning rate": ("lr",),
    "peak memory, GiB": ("memory_peak_gib",),
    "seconds of a step": ("step_seconds", "data_wait_seconds"),
}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; color: #1f2937; background: #fff }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 1rem }
svg { width: 100%; border: 1px solid #e5e7eb; border-radius: 6px } svg text { font: 11px system-ui, sans-serif; fill: #374151 }
svg .title { font-size: 13px; font-weight: 600 } svg .grid { stroke: #e5e7eb }
table { border-collapse: collapse } td, th { padding: .15rem .9rem .15rem 0; text-align: left }
@media (prefers-color-scheme: dark) {
  body { background: #111827; color: #e5e7eb } svg, svg .grid { border-color: #374151; stroke: #374151 } svg text { fill: #d1d5db; stroke: none }
}
"""


def facts(run: Run) -> dict[str, str]:
    """The newest line in words."""
    line = run.lines[-1]
    wanted = {
        "step": f"{line['step']:,}",
        "loss": f"{line['loss']:.4f}",
        "gradient norm": f"{line['grad_norm']:.4f}",
        "tokens seen": f"{line['tokens_seen']:,}",
        "tokens a second": f"{line['tokens_per_second']:,.0f}",
        "MFU": f"{line['mfu']:.1f} %" if "mfu" in line else "unknown device",
        "peak memory": f"{line['memory_peak_gib']:.2f} GiB ({line['memory_peak_percent']:.0f} %)",
        "time left": duration(line["eta_seconds"]),
        "last line": f"{duration(max(time.time() - line['time'], 0))} ago",
    }
    if run.validation:
        wanted["validation loss"] = f"{run.validation[-1][1]:.4f} at step {run.validation[-1][0]}"
    return wanted


def checkpoints(run: Run) -> list[str]:
    """The published checkpoints under the run's folder, newest first; sizes are compared, not bytes."""
    found = []
    for path in choice.candidates(run.folder / "checkpoint"):
        try:
            manifest = manifests.read(path)
            manifests.check(path, manifest, "size")
            size = sum(size for size, _ in manifest.files.values())
            found.append(f"{path.name}: {size / 2**20:,.1f} MiB")
        except manifests.Damaged as damage:
            found.append(f"{path.name}: not intact: {damage}")
    return found


def terminal(run: Run) -> Group:
    """What ``tools/watch.py`` shows."""
    table = Table.grid(padding=(0, 3))
    pairs = list(facts(run).items())
    for row in range(0, len(pairs), 2):
        table.add_row(*(Text.assemble((name, "dim"), "  ", value) for name, value in pairs[row : row + 2]))
    parts: list[Any] = [
        Text(str(run.folder), style="bold"),
        table,
        Text(plot.text({"loss": curve(run, "loss")}, "loss")),
    ]
    parts.append(Text(plot.text({"tokens": curve(run, "tokens_per_second")}, "tokens a second", height=8)))
    parts += [Text(f"checkpoint  {line}") for line in checkpoints(run)[:4]]
    parts += [Text(f"step {step}  {kind}: {words}", style="yellow") for step, kind, words in run.events[-5:]]
    return Group(*parts)


def html_page(run: Run) -> str:
    """One page with everything in it: no script, no link to anything elsewhere."""
    plots = [
        plot.svg({key: curve(run, key) for key in keys if curve(run, key)}, title)
        for title, keys in CURVES.items()
        if curve(run, keys[0])
    ]
    if run.validation:
        plots.insert(1, plot.svg({"validation loss": run.validation}, "validation loss"))
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in facts(run).items()
    )
    events = "".join(
        f"<tr><td>{step}</td><td>{html.escape(kind)}</td><td>{html.escape(words)}</td></tr>"
        for step, kind, words in run.events
    )
    stored = "".join(f"<li>{html.escape(line)}</li>" for line in checkpoints(run))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(run.folder.name)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(str(run.folder))}</h1><table>{rows}</table>"
        f'<h2>Curves</h2><div class="plots">{"".join(plots)}</div>'
        + (f"<h2>Checkpoints</h2><ul>{stored}</ul>" if stored else "")
        + (f"<h2>Events</h2><table>{events}</table>" if events else "")
        + "</body></html>\n"
    )
