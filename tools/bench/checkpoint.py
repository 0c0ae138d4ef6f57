#!/usr/bin/env python
"""What an asynchronous checkpoint costs training, against a synchronous one and against steps without any.

    python tools/bench/checkpoint.py [--json] [--gigabytes 1] [--rounds 3]

A trainer whose state (weights and both moments of AdamW) is about a gigabyte takes steps, saves in the background, steps
on beside the write, waits for it, takes as many steps undisturbed, and saves synchronously; round after round.

stall    seconds that a step waits for an asynchronous save (ours) and for a synchronous one (theirs)
step     seconds of a step beside the background write (ours) and of one without (theirs)
bytes    of a checkpoint's files (ours) and of the tensors in it (theirs)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import contextlib
import math
import statistics
import tempfile
import time
from typing import Any

import _environment  # noqa: F401

BYTES_A_PARAMETER = 12
"""Weight and two moments in float32."""
LAYERS = 12


def settings(folder: str, size: float, mode: str) -> dict[str, Any]:
    """A model of ``size`` bytes of state: a block of width d with a feed-forward of 3 d holds 13 d^2 parameters."""
    dim = 64 * max(1, round(math.sqrt(size / BYTES_A_PARAMETER / LAYERS / 13) / 64))
    return {
        "job": {"dump_folder": folder},
        "model": {"dim": dim, "ffn_dim": 3 * dim, "n_layers": LAYERS, "n_heads": dim // 64, "n_kv_heads": dim // 64},
        "training": {
            "seq_len": 64,
            "local_batch_size": 1,
            "global_batch_size": 1,
            "steps": 10**6,
            "mixed_precision_param": "float32",
        },
        "metrics": {"log_freq": 10**6, "enable_tensorboard": False},
        "activation_checkpoint": {"mode": "none"},
        "checkpoint": {"enable": True, "interval": 10**6, "async_mode": mode, "keep_latest_k": 1},
    }


def measure(size: float, rounds: int, mode: str) -> dict[str, dict[str, float]]:
    """The three cases; each round measures both sides of each."""
    from _report import case

    from titanlite.checkpoint.manager import CheckpointManager
    from titanlite.config import from_dict
    from titanlite.distributed.world import World
    from titanlite.train import Trainer

    with tempfile.TemporaryDirectory() as folder:
        config = from_dict(settings(folder, size, mode))
        world = World.start(config.comm)
        trainer = Trainer(config, world)
        synchronous = from_dict(settings(folder, size, "disabled"))
        other = CheckpointManager(synchronous, world, trainer.mesh.describe(), Path(folder) / "synchronous")
        trainer.begin()

        def step() -> float:
            began = time.perf_counter()
            trainer.step()
            return time.perf_counter() - began

        samples: dict[str, tuple[list[float], list[float]]] = {"stall": ([], []), "step": ([], [])}
        for turn in range(rounds + 1):
            step()
            stall = trainer.checkpoints.save(trainer.state.step, trainer.snapshot)
            thread = trainer.checkpoints.thread
            beside = []
            while thread is not None and thread.is_alive():
                beside.append(step())
            trainer.checkpoints.wait()
            alone = [step() for _ in beside]
            waited = other.save(trainer.state.step, trainer.snapshot)
            # The first round allocates the staging buffers, once in a run.
            if turn:
                samples["stall"][0].append(stall)
                samples["stall"][1].append(waited)
                samples["step"][0].append(statistics.mean(beside))
                samples["step"][1].append(statistics.mean(alone))
        newest = Path(str(other.newest()))
        written = float(sum(file.stat().st_size for file in newest.iterdir()))
        tensors = trainer.snapshot().tensors().values()
        held = float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        other.close()
        trainer.close()
        world.close()
    return {name: case(*both) for name, both in samples.items()} | {"bytes": case([written], [held])}


def main() -> None:
    """Measure and print."""
    from _report import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count; one more runs first")
    parser.add_argument("--mode", choices=["async", "async_with_pinned_mem"], default="async", help="how ours saves")
    arguments = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        cases = measure(arguments.gigabytes * 1e9, arguments.rounds, arguments.mode)
    report(cases, arguments.json, unit="s, bytes")


if __name__ == "__main__":
    main()
