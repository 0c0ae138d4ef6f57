"""What holds a run back, in words, with its share of the time and the key to turn."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import UserError
from titanlite.monitor.runs import Run

WORTH_TELLING = 0.02
"""Shares below this are noise."""


@dataclass(frozen=True)
class Finding:
    """Something that costs time.

    Attributes:
        share: of the time of a step, 0 to 1; findings without one, such as memory close to its limit, have 0.
    """

    what: str
    share: float
    advice: str

    def __str__(self) -> str:
        share = f"{self.share:6.1%}  " if self.share else "        "
        return f"{share}{self.what}\n        {self.advice}"


def of_run(run: Run) -> list[Finding]:
    """What a run's metrics show, the costliest first. The first line is left out: it holds the start."""
    lines = run.lines[1:] or run.lines
    steps = [line["step_seconds"] for line in lines]
    typical = statistics.median(steps)
    findings = [
        Finding(
            "waiting for data",
            statistics.fmean(line["data_wait_seconds"] for line in lines) / statistics.fmean(steps),
            "raise data.prefetch, tokenize the corpus beforehand (tools/tokenize_corpus.py), or move it to a faster disk",
        ),
        Finding(
            "waiting for checkpoints",
            sum(line["checkpoint_stall_seconds"] for line in lines) / _elapsed(run),
            "set checkpoint.async_mode = 'async', or raise checkpoint.interval",
        ),
        Finding(
            "waiting for slow ranks",
            statistics.fmean(line.get("rank_seconds_spread", 0.0) for line in lines) / statistics.fmean(steps),
            "compare the ranks' step times: a throttled device, a busy node or an uneven pipeline split",
        ),
    ]
    slow = [
        line["step"] for line in lines if line["step_seconds"] > 2 * typical and line["checkpoint_stall_seconds"] == 0
    ]
    if slow:
        extra = sum(line["step_seconds"] - typical for line in lines if line["step"] in slow) / sum(steps)
        findings.append(
            Finding(
                f"single slow lines, such as step {slow[0]}",
                extra,
                "recompilation (compile with fixed shapes), garbage collection (training.gc_freq) or a shared machine",
            )
        )
    told = [f for f in findings if f.share >= WORTH_TELLING]
    fullest = max(line["memory_peak_percent"] for line in lines)
    if fullest > 90:
        told.append(
            Finding(
                f"memory is {fullest:.0f} % full",
                0.0,
                "near the limit the allocator frees and retries: activation_checkpoint.mode = 'full' or a smaller local_batch_size",
            )
        )
    return sorted(told, key=lambda finding: -finding.share)


def of_trace(file: Path) -> list[Finding]:
    """What a Chrome trace of ``[profiling]`` shows, the costliest first.

    Raises:
        UserError: it is no such trace.
    """
    try:
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no trace: {error}") from None
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in timed if str(e.get("name", "")).startswith("ProfilerStep")]
    if not steps:
        raise UserError(f"{file} holds no whole step: raise profiling.profiler_active")
    whole = sum(end - begin for begin, end in steps)
    kernels = [e for e in timed if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(
        (
            f
            for f in (_on_device(kernels, steps, whole) if kernels else _on_cpu(timed, whole))
            if f.share >= WORTH_TELLING
        ),
        key=lambda finding: -finding.share,
    )


def _on_cpu(timed: list[dict[str, Any]], whole: float) -> list[Finding]:
    by_name: dict[str, float] = defaultdict(float)
    for event in timed:
        name = str(event["name"])
        if name.startswith("gloo:"):
            by_name[name.removeprefix("gloo:")] += event["dur"]
    return [
        Finding(
            f"communication: {name}",
            spent / whole,
            "fewer, larger messages: a larger micro-batch, or another layout (tools/plan.py)",
        )
        for name, spent in by_name.items()
    ]


def _on_device(kernels: list[dict[str, Any]], steps: list[tuple[float, float]], whole: float) -> list[Finding]:
    communication = [e for e in kernels if "nccl" in str(e["name"]).lower()]
    computing = _merged([(e["ts"], e["ts"] + e["dur"]) for e in kernels if "nccl" not in str(e["name"]).lower()])
    by_name: dict[str, float] = defaultdict(float)
    for event in communication:
        span = (event["ts"], event["ts"] + event["dur"])
        by_name[_collective(str(event["name"]))] += event["dur"] - _overlap(span, computing)
    busy = _merged([(e["ts"], e["ts"] + e["dur"]) for e in kernels])
    idle = whole - sum(_overlap(step, busy) for step in steps)
    exposed = [
        Finding(
            f"exposed communication: {name}",
            spent / whole,
            "another layout (tools/plan.py --search), or a larger micro-batch to hide it",
        )
        for name, spent in by_name.items()
    ]
    advice = "the CPU does not launch kernels fast enough: compile.enable, a larger micro-batch, or less logging"
    return [*exposed, Finding("the device waits for the CPU", idle / whole, advice)]


def _collective(kernel: str) -> str:
    for name in ("AllGather", "ReduceScatter", "AllReduce", "AllToAll", "SendRecv", "Broadcast"):
        if name.lower() in kernel.lower():
            return name
    return kernel


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _overlap(span: tuple[float, float], merged: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in merged)


def _elapsed(run: Run) -> float:
    lines = run.lines
    return max(lines[-1]["time"] - lines[0]["time"], lines[-1]["step_seconds"])
