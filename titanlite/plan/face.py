"""The plan in words, tables and pictures: in the terminal, as a page, and at the start of a run."""

from __future__ import annotations

import html
import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from titanlite.plan import hardware
from titanlite.plan.estimate import Estimate, of_config
from titanlite.plan.memory import memory
from titanlite.plan.search import changed, name
from titanlite.plan.workload import from_config

if TYPE_CHECKING:
    from rich.console import Console

    from titanlite.config import Config

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "working", "buffers", "reserved")
COLOURS = ("#4878cf", "#6acc65", "#d65f5f", "#b47cc7", "#c4ad66", "#77bedb", "#f0a050", "#bbbbbb")
TERMINAL = ("blue", "green", "red", "magenta", "yellow", "cyan", "bright_red", "white")


def show(e: Estimate, console: Console) -> None:
    """Speed, memory by pipeline rank with a bar, and the collectives of the first one."""
    from rich.table import Table

    t = e.time
    console.print(f"[bold]{name(e)}[/bold] on {e.workload.gpus} x {e.device.name}")
    console.print(
        f"{e.tokens_per_second_per_device:,.0f} tokens/s/device, step {t.total:.3g} s, "
        f"{e.model_flops / 1e12:.0f} TFLOP/s/device, MFU {e.mfu:.1%}; {e.binds} binds"
    )
    verdict = "[green]fits[/green]" if e.fits else "[red]does not fit[/red]"
    console.print(
        f"peak {e.peak_gib:.1f} GiB and {e.device.reserved_gib:.1f} for the driver, of {e.device.memory_gib:.0f}: {verdict}\n"
    )
    seconds = Table(title="seconds of a step", title_justify="left")
    for part in asdict(t):
        seconds.add_column(part.replace("_", " "), justify="right")
    seconds.add_row(*(f"{value:.3g}" for value in asdict(t).values()))
    console.print(seconds)
    table = Table(title="GiB by pipeline rank", title_justify="left")
    for column in ("rank", *PARTS, "total"):
        table.add_column(column, justify="right")
    for rank in _told(len(e.memories)):
        gib = e.memories[rank].gib()
        table.add_row(str(rank), *(f"{gib[part]:.2f}" for part in PARTS), f"{gib['total']:.2f}")
    console.print(table)
    for rank in _told(len(e.memories)):
        console.print(f"{rank:4d} {_bar(e, rank)}")
    console.print("     " + "  ".join(f"[{c}]█[/{c}] {p}" for p, c in zip(PARTS, TERMINAL, strict=True)) + "\n")
    traffic = Table(title="collectives of a step on a rank of pipeline rank 0", title_justify="left")
    for column in ("kind", "group", "ranks", "what", "calls", "MiB", "link", "ms", "overlaps"):
        traffic.add_column(column)
    for c in e.traffic[0]:
        told = c.as_dict(e.device, e.workload)
        traffic.add_row(
            c.kind,
            c.dimension,
            str(c.size),
            c.purpose,
            f"{c.calls:.0f}",
            f"{c.bytes / 2**20:,.1f}",
            told["link"],
            f"{told['seconds'] * 1e3:.1f}",
            "yes" if c.overlaps else "no",
        )
    if e.traffic[0]:
        console.print(traffic)


def _told(ranks: int) -> list[int]:
    """All of a few, else both ends."""
    return list(range(ranks)) if ranks <= 8 else [*range(4), *range(ranks - 4, ranks)]


def _bar(e: Estimate, rank: int, width: int = 72) -> str:
    full = max(e.device.memory_gib, e.peak_gib)
    gib, text, used = e.memories[rank].gib(), "", 0
    end = 0.0
    for part, colour in zip(PARTS, TERMINAL, strict=True):
        end += gib[part]
        cells = round(end / full * width) - used
        text += f"[{colour}]{'█' * cells}[/{colour}]"
        used += cells
    return text + "·" * (width - used)


def show_search(found: list, lines: list[str], console: Console) -> None:
    """The ranking, and why."""
    from rich.table import Table

    table = Table(title="layouts that fit, fastest first", title_justify="left")
    for column in ("pp", "replicate", "shard", "cp", "tp", "rows", "passes", "recompute", "schedule"):
        table.add_column(column, justify="right")
    for column in ("tokens/s/device", "MFU", "step s", "GiB", "binds"):
        table.add_column(column, justify="right")
    for each in found:
        e, w = each.estimate, each.estimate.workload
        degrees = (w.pp, w.dp_replicate, w.dp_shard, w.cp, w.tp, w.micro_rows, w.passes)
        table.add_row(
            *map(str, degrees),
            w.recompute,
            w.schedule,
            f"{e.tokens_per_second_per_device:,.0f}",
            f"{e.mfu:.1%}",
            f"{e.time.total:.3g}",
            f"{e.peak_gib:.1f}",
            e.binds,
        )
    console.print(table)
    for line in lines:
        console.print(line)


def show_comparison(first: Estimate, second: Estimate, names: tuple[str, str], console: Console) -> None:
    """Two plans side by side."""
    from rich.table import Table

    table = Table(title_justify="left")
    for column in ("", *names, "second / first"):
        table.add_column(column, justify="right")

    def row(what: str, a: float, b: float) -> None:
        table.add_row(what, f"{a:,.4g}", f"{b:,.4g}", f"{b / a:.3f}" if a else "")

    row("tokens/s/device", first.tokens_per_second_per_device, second.tokens_per_second_per_device)
    row("MFU %", first.mfu * 100, second.mfu * 100)
    row("step s", first.time.total, second.time.total)
    for part, value in asdict(first.time).items():
        row(f"  {part.replace('_', ' ')} s", value, getattr(second.time, part))
    row("peak GiB", first.peak_gib, second.peak_gib)
    a, b = _worst(first).gib(), _worst(second).gib()
    for part in PARTS:
        row(f"  {part} GiB", a[part], b[part])
    console.print(table)


def _worst(e: Estimate) -> Any:
    return max(e.memories, key=lambda each: each.total)


def page(e: Estimate, layouts: list | None = None) -> str:
    """One self-contained HTML page with the plan's plots."""
    rows = "".join(
        f"<tr><td>{html.escape(c.kind)}</td><td>{c.dimension}</td><td>{c.size}</td><td>{html.escape(c.purpose)}</td>"
        f"<td>{c.calls:.0f}</td><td>{c.bytes / 2**20:,.1f}</td></tr>"
        for c in e.traffic[0]
    )
    seconds = [(part.replace("_", " "), value) for part, value in asdict(e.time).items()]
    bars = [(f"rank {i}", [m.gib()[part] for part in PARTS]) for i, m in enumerate(e.memories)]
    ranking = ""
    if layouts:
        speeds = [(name(f.estimate), [f.estimate.tokens_per_second_per_device]) for f in layouts]
        ranking = "<h2>Layouts, tokens/s/device</h2>" + _plot(speeds, ("",), None)
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>titanlite plan</title>
<style>body{{font:15px system-ui;margin:2em auto;max-width:60em}}td,th{{padding:.2em .8em;text-align:right}}</style>
<h1>{html.escape(name(e))}</h1>
<p>{e.workload.gpus} x {html.escape(e.device.name)}: {e.tokens_per_second_per_device:,.0f} tokens/s/device,
MFU {e.mfu:.1%}, step {e.time.total:.3g} s, peak {e.peak_gib:.1f} GiB,
{"fits" if e.fits else "does not fit"}; {html.escape(e.binds)} binds.</p>
<h2>Memory by pipeline rank, GiB</h2>{_plot(bars, PARTS, e.device.memory_gib)}
<h2>Seconds of a step</h2>{_plot([("step", [v for _, v in seconds])], tuple(k for k, _ in seconds), None)}
{ranking}
<h2>Collectives of a step on a rank of pipeline rank 0</h2>
<table><tr><th>kind<th>group<th>ranks<th>what<th>calls<th>MiB</tr>{rows}</table></html>
"""


def _plot(bars: list[tuple[str, list[float]]], parts: tuple[str, ...], limit: float | None) -> str:
    """Horizontal stacked bars as inline SVG, with a line at ``limit``."""
    full = max([limit or 0.0, *(sum(values) for _, values in bars)]) or 1.0
    height = 22 * len(bars) + 40
    text = f'<svg viewBox="0 0 900 {height}" width="100%" font-size="12" font-family="system-ui">'
    for i, (label, values) in enumerate(bars):
        at, y = 250.0, 22 * i
        text += f'<text x="244" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>'
        for part, value, colour in zip(parts, values, COLOURS, strict=False):
            width = 560 * value / full
            tip = f"{part} {value:.3g}".strip()
            text += f'<rect x="{at:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{colour}">'
            text += f"<title>{html.escape(tip)}</title></rect>"
            at += width
        text += f'<text x="{at + 6:.1f}" y="{y + 14}">{sum(values):.4g}</text>'
    if limit:
        x = 250 + 560 * limit / full
        text += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 40}" stroke="black" stroke-dasharray="4"/>'
    step = 900 / max(1, len(parts))
    for i, (part, colour) in enumerate(zip(parts, COLOURS, strict=False)):
        if part:
            text += f'<rect x="{i * step:.0f}" y="{height - 20}" width="12" height="12" fill="{colour}"/>'
            text += f'<text x="{i * step + 16:.0f}" y="{height - 10}">{html.escape(part)}</text>'
    return text + "</svg>"


@dataclass(frozen=True)
class Prediction:
    """What a run expects of itself."""

    tokens_per_second_per_device: float | None
    memory_gib: float

    def beside(self, tokens_per_second_per_device: float, memory_gib: float | None) -> list[str]:
        """Lines for after some steps: measured beside predicted."""
        lines = []
        if self.tokens_per_second_per_device:
            share = tokens_per_second_per_device / self.tokens_per_second_per_device
            lines.append(
                f"tokens/s/device {tokens_per_second_per_device:,.0f}, the plan said "
                f"{self.tokens_per_second_per_device:,.0f} ({share:.0%})"
            )
        if memory_gib:
            lines.append(
                f"peak memory {memory_gib:.2f} GiB, the plan said {self.memory_gib:.2f} "
                f"({memory_gib / self.memory_gib:.0%})"
            )
        return lines


def predict(config: Config, world_size: int, cuda_name: str | None) -> Prediction:
    """The prediction for a run on devices called ``cuda_name``, or on CPUs, whose speed is not predicted."""
    device = hardware.recognised(cuda_name) if cuda_name else hardware.DEVICES["cpu"]
    known = device is not None and cuda_name is not None
    e = of_config(config, world_size, device or hardware.DEVICES["h100"])
    return Prediction(e.tokens_per_second_per_device if known else None, e.peak_gib)


def summary(config: Config, device: Any, world_size: int = 1) -> list[str]:
    """A few lines for the start of a run on ``device`` (a torch.device)."""
    cuda_name = None
    if device.type == "cuda":
        import torch

        cuda_name = torch.cuda.get_device_name(device)
    found = predict(config, world_size, cuda_name)
    line = f"plan: peak memory {found.memory_gib:.2f} GiB a rank"
    if found.tokens_per_second_per_device:
        line += f", {found.tokens_per_second_per_device:,.0f} tokens/s/device"
    return [line]


@dataclass(frozen=True)
class WayOut:
    """One change of the config, the bytes it saves on the worst rank, and what the step becomes as a factor.

    Attributes:
        slower: None where the plan has no model of the cost.
    """

    what: str
    saves: float
    slower: float | None

    def __str__(self) -> str:
        if self.slower is None:
            return f"{self.what} saves {self.saves / 2**30:.2f} GiB a rank (slower, by how much is not predicted)"
        cost = f"{self.slower - 1:+.0%} step time" if abs(self.slower - 1) >= 0.005 else "no cost"
        return f"{self.what} saves {self.saves / 2**30:.2f} GiB a rank ({cost})"


def ways_out(config: Config, world_size: int, device: hardware.Device | None = None, most: int = 3) -> list[WayOut]:
    """The cheapest ways out of an out-of-memory error that save at least 3 % of the peak, least loss of speed first."""
    device = device or hardware.DEVICES["h100"]
    on_cpu = device.name == "cpu"
    before = of_config(config, world_size, device)
    base = before.workload
    peak, speed = _worst(before).total, before.tokens_per_second_per_device
    found = []
    for what, changes in _changes(config, world_size):
        offload = changes.get("training", {}).get("enable_cpu_offload", False)
        if offload and on_cpu:
            continue
        w = from_config(changed(config, changes), world_size, on_cpu)
        if w.micro_rows * w.passes * w.data_size < base.micro_rows * base.passes * base.data_size:
            continue
        from titanlite.plan.estimate import estimate

        after = estimate(replace(w), device)
        worst = max(memory(w, rank, device).total for rank in range(len(w.stages)))
        saves = peak - worst
        if saves > 0.03 * peak:
            slower = None if offload else speed / after.tokens_per_second_per_device
            found.append(WayOut(what, saves, slower))
    found.sort(key=lambda way: (math.inf if way.slower is None else round(way.slower, 2), -way.saves))
    return found[:most]


def _changes(config: Config, world_size: int) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Single changes that save memory and leave the run's numbers as they are."""
    t, p, ac = config.training, config.parallelism, config.activation_checkpoint
    w = from_config(config, world_size)
    rows = w.micro_rows * w.passes * w.data_size
    keys: dict[str, Any]
    found: list[tuple[str, dict[str, dict[str, Any]]]] = []
    if ac.mode == "none" or (ac.mode == "selective" and ac.selective_ac_option != "op"):
        keys = {"mode": "selective", "selective_ac_option": "op"}
        text = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"
        found.append((text, {"activation_checkpoint": keys}))
    if ac.mode != "full":
        found.append(("--activation_checkpoint.mode=full", {"activation_checkpoint": {"mode": "full"}}))
    if p.pipeline_parallel_degree == 1 and t.local_batch_size % 2 == 0:
        keys = {"local_batch_size": t.local_batch_size // 2, "global_batch_size": rows}
        text = f"--training.local_batch_size={keys['local_batch_size']} --training.global_batch_size={rows}"
        found.append((text, {"training": keys}))
    if t.loss_chunks != "auto":
        found.append(("--training.loss_chunks=auto", {"training": {"loss_chunks": "auto"}}))
    if config.optimizer.state_dtype == "float32" and config.optimizer.name != "Muon":
        found.append(("--optimizer.state_dtype=bfloat16", {"optimizer": {"state_dtype": "bfloat16"}}))
    if p.fsdp_reshard_after_forward == "never" or (w.gathered_after_forward and w.pp > 1):
        keys = {"fsdp_reshard_after_forward": "always"}
        found.append(("--parallelism.fsdp_reshard_after_forward=always", {"parallelism": keys}))
    if w.dp_replicate > 1:
        keys = {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": w.data_size}
        text = f"--parallelism.data_parallel_replicate_degree=1 --parallelism.data_parallel_shard_degree={w.data_size}"
        found.append((text, {"parallelism": keys}))
    if not t.enable_cpu_offload:
        found.append(("--training.enable_cpu_offload", {"training": {"enable_cpu_offload": True}}))
    return found
