#!/usr/bin/env python
"""What each precision policy costs in loss: the same small model, text and seed, trained 200 steps under each.

    python tools/bench/precision.py [--steps 200] [--only bfloat16] [--json]

``ours`` is a policy's mean loss over the last 20 steps, ``theirs`` float32's. The case ``another seed`` is float32 with
other initial weights and another order of the text: a difference well below its is none that a run would notice. float8
is emulated, and so runs anywhere; the case of the reduction runs in two processes, as one reduces nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import contextlib
import io
import statistics
import tempfile
from typing import Any

import _environment  # noqa: F401

LAST = 20
"""Steps whose mean loss is compared."""

Tables = dict[str, dict[str, Any]]


def _float8(recipe: str) -> Tables:
    return {
        "model": {"converters": ["float8"]},
        "quantize": {"linear": {"float8": {"recipe_name": recipe, "emulate": True}}},
        "training": {"mixed_precision_param": "bfloat16"},
    }


POLICIES: dict[str, Tables] = {
    "float32": {},
    "another seed": {"debug": {"seed": 1}},
    "bfloat16": {"training": {"mixed_precision_param": "bfloat16"}},
    "bfloat16, bfloat16 reduce": {
        "training": {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "bfloat16"},
        "parallelism": {"data_parallel_shard_degree": 2},
    },
    "bfloat16, bfloat16 moments": {
        "training": {"mixed_precision_param": "bfloat16"},
        "optimizer": {"state_dtype": "bfloat16"},
    },
    "pure bfloat16": {"training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}},
    "float16": {"training": {"mixed_precision_param": "float16"}},
    "float8 tensorwise": _float8("tensorwise"),
    "float8 rowwise": _float8("rowwise"),
    "float8 rowwise_with_gw_hp": _float8("rowwise_with_gw_hp"),
}


def processes(tables: Tables) -> int:
    """How many processes a policy is tried in."""
    return tables.get("parallelism", {}).get("data_parallel_shard_degree", 1)


def trained(steps: int, tables: Tables) -> float:
    """Mean loss over the last steps of a run."""
    from titanlite.config import from_dict
    from titanlite.distributed.world import World
    from titanlite.train import Trainer

    losses: list[float] = []

    class Quiet(Trainer):
        """A trainer that keeps the losses to itself."""

        def record(self, verdict: Any) -> None:
            self.stopping, self.data_ended = verdict.stop, verdict.data_ended
            losses.append(verdict.loss)

    settings: Tables = {
        "job": {"dump_folder": tempfile.mkdtemp()},
        "model": {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 192},
        "training": {
            "seq_len": 64,
            "local_batch_size": 4,
            "global_batch_size": 4,
            "steps": steps,
            "mixed_precision_param": "float32",
        },
        "optimizer": {"lr": 3e-3},
        "lr_scheduler": {"warmup_steps": 10},
        "activation_checkpoint": {"mode": "none"},
    }
    for name, values in tables.items():
        settings[name] = settings.get(name, {}) | values
    config = from_dict(settings, world_size=processes(tables))
    world = World.start(config.comm)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = Quiet(config, world)
            try:
                trainer.run()
            finally:
                trainer.close()
    finally:
        world.close()
    return statistics.mean(losses[-LAST:])


def main() -> None:
    """Train under each policy and compare."""
    from _report import case, report
    from step import in_processes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--only", default="", help="only policies whose name has this in it, and float32")
    arguments = parser.parse_args()
    losses: dict[str, Any] = {
        name: in_processes(processes(tables), (arguments.steps, tables), trained)
        for name, tables in POLICIES.items()
        if name == "float32" or arguments.only in name
    }
    report({name: case([loss], [losses["float32"]]) for name, loss in losses.items()}, arguments.json, "loss")


if __name__ == "__main__":
    main()
