#!/usr/bin/env python
"""The default model's training step compiled against eager, and what the first compiled step costs.

    python tools/bench/compile.py [--json]

One process; both sides take turns. ``first step`` is compilation included, on whatever inductor has cached by then.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import contextlib
import io
import tempfile
import time

import _environment
import torch
from step import in_processes


def measure(rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Seconds of a step compiled (ours) and eager (theirs), and of the first."""
    from _report import case

    from titanlite.config import from_dict, load
    from titanlite.distributed.world import World
    from titanlite.train import Trainer

    torch.set_num_threads(1)
    file = _environment.ROOT / "train_configs" / "debug_model.toml"

    def trainer(compiled: bool) -> Trainer:
        made = Trainer(
            load(
                [
                    f"--job.config_file={file}",
                    f"--job.dump_folder={tempfile.mkdtemp()}",
                    f"--compile.enable={str(compiled).lower()}",
                    "--checkpoint.enable=false",
                    "--metrics.log_freq=100000",
                    "--training.steps=100000",
                ]
            ),
            world,
        )
        made.begin()
        return made

    def timed(side: Trainer, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            side.step()
        return (time.perf_counter() - began) / count

    world = World.start(from_dict({}).comm)
    with contextlib.redirect_stdout(io.StringIO()):
        sides = [trainer(True), trainer(False)]
        first = [timed(side, 1) for side in sides]
    for side in sides:
        timed(side, 2)
    pairs = [[timed(side, steps) for side in sides] for _ in range(rounds)]
    for side in sides:
        side.close()
    world.close()
    return {
        "first step": case([first[0]], [first[1]]),
        "later steps": case([a for a, _ in pairs], [b for _, b in pairs]),
    }


def main() -> None:
    """Measure in a fresh process and report."""
    from _report import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    arguments = parser.parse_args()
    report(in_processes(1, (arguments.rounds, arguments.steps), measure), arguments.json)


if __name__ == "__main__":
    main()
