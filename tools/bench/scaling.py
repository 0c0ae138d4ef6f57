#!/usr/bin/env python
"""More processes: weak scaling (rows a process fixed), strong scaling (rows of the step fixed), and what communicates.

    python tools/bench/scaling.py [--processes 1,2] [--json]

``ours`` is the step time with so many processes, ``theirs`` that of one process. Ideal is a ratio of 1 for weak scaling
and of 1 / processes for strong. ``communication`` is the share of a step that rank 0 spends in collectives, by torch's
profiler.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import json
import statistics
import tempfile
import time

import _environment  # noqa: F401
import torch
from step import ROWS, SEQ_LEN, in_processes


def measure(processes: int, rows: int, steps: int) -> dict[str, float] | None:
    """Step time and communication share in this rank; rank 0 returns them."""
    from torch.profiler import ProfilerActivity, profile

    from titanlite.config import from_dict
    from titanlite.distributed.world import World
    from titanlite.train import Trainer

    torch.set_num_threads(1)
    settings = {
        "job": {"dump_folder": tempfile.mkdtemp()},
        "training": {
            "local_batch_size": rows // processes,
            "global_batch_size": rows,
            "seq_len": SEQ_LEN,
            "mixed_precision_param": "float32",
        },
        "activation_checkpoint": {"mode": "none"},
    }
    config = from_dict(settings, world_size=processes)
    world = World.start(config.comm)
    trainer = Trainer(config, world)
    trainer.begin()
    for _ in range(2):
        trainer.step()
    times = []
    for _ in range(steps):
        world.barrier()
        begun = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - begun)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        begun = time.perf_counter()
        trainer.step()
        whole = time.perf_counter() - begun
    spent = sum(event.cpu_time_total for event in trace.key_averages() if event.key.startswith("gloo:")) / 1e6
    rank = world.rank
    trainer.close()
    del trainer
    world.close()
    return {"seconds": statistics.median(times), "communication": spent / whole} if rank == 0 else None


def main() -> None:
    """Measure and print."""
    from _report import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--processes", default="1,2", help="numbers of processes, separated by commas")
    parser.add_argument("--steps", type=int, default=7, help="steps measured in each case")
    arguments = parser.parse_args()
    cases = {}
    one = in_processes(1, (1, ROWS, arguments.steps), measure)
    for processes in map(int, arguments.processes.split(",")):
        for kind, rows in (("weak", ROWS * processes), ("strong", ROWS)):
            found = in_processes(processes, (processes, rows, arguments.steps), measure)
            name = f"{kind}, {processes} process{'es' * (processes > 1)}"
            cases[name] = {
                "ours": found["seconds"],
                "theirs": one["seconds"],
                "ratio": found["seconds"] / one["seconds"],
                "communication": found["communication"],
            }
    if arguments.json:
        print(json.dumps({"machine": machine(), "cases": cases}, indent=1))
        return
    for name, values in cases.items():
        print(
            f"{name:22}  {values['ours']:8.3f} s  ratio {values['ratio']:.3f}  communication {values['communication']:.1%}"
        )


if __name__ == "__main__":
    main()
