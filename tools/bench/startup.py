#!/usr/bin/env python
"""From the command to the first step of the debug model, against what importing torch and starting a process group cost.

    python tools/bench/startup.py [--json]

``ours`` is the time from starting ``python -m titanlite.train`` to its first logged step, ``theirs`` that of a process
which imports torch, starts a gloo group of one, and ends. The two take turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import subprocess
import tempfile
import time

import _environment

BARE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
"""


def until_first_step() -> float:
    """Seconds from the command to the first line of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "titanlite.train", f"--job.dump_folder={folder}", "--training.steps=1"]
        words += ["--training.seq_len=64", "--training.local_batch_size=1"]
        begun = time.perf_counter()
        process = subprocess.Popen(words, cwd=_environment.ROOT, stdout=subprocess.DEVNULL)
        metrics = Path(folder) / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        seconds = time.perf_counter() - begun
        if process.wait():
            raise SystemExit("the run failed; its error stands above")
    return seconds


def bare() -> float:
    """Seconds of a process that imports torch and starts a process group."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", BARE], check=True)
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    from _report import in_turn, report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    arguments = parser.parse_args()
    report({"first step": in_turn(until_first_step, bare, arguments.rounds)}, arguments.json)


if __name__ == "__main__":
    main()
