#!/usr/bin/env python
"""Know before you launch: does a config fit, where does the memory go, how fast will it run, which layout is best.

    tools/plan.py train_configs/llama3_8b.toml --gpus 8 --gpu h100
    tools/plan.py train_configs/llama3_70b.toml --gpus 512 --gpu h100 --parallelism.tensor_parallel_degree=4 --json
    tools/plan.py train_configs/llama3_405b.toml --gpus 16384 --gpu h100 --search --write best.toml
    tools/plan.py train_configs/llama3_8b.toml --gpus 8 --exact              # the real code on fake tensors
    tools/plan.py --compare a.toml b.toml --gpus 8 --gpu h200

Every override that run_train.sh takes is taken here too. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import _environment  # noqa: F401

from titanlite.config import from_dict, load, to_toml
from titanlite.errors import UserError
from titanlite.plan import face, hardware
from titanlite.plan.estimate import of_config
from titanlite.plan.search import search, why


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, 1 where no layout fits, 2 for wrong input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="TOML file")
    parser.add_argument("--gpus", type=int, default=None, help="number of devices (default: 8)")
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(hardware.DEVICES)}, or a TOML file of one's own")
    parser.add_argument("--gpus-per-node", type=int, help="devices that share the fast links (default: the kind's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", help="write a page with plots")
    parser.add_argument("--search", action="store_true", help="rank the legal layouts")
    parser.add_argument(
        "--write", metavar="FILE", help="write the best layout (or this one) as a TOML file ready to run"
    )
    parser.add_argument("--exact", action="store_true", help="run the real code on fake tensors")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two TOML files side by side")
    arguments, overrides = parser.parse_known_args(argv)
    if not arguments.config and not arguments.compare:
        parser.error("give a TOML file, or --compare A B")
    try:
        return run(arguments, overrides)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """What the arguments ask for."""
    gpus = 8 if arguments.gpus is None else arguments.gpus
    if gpus < 1:
        raise UserError(f"--gpus must be at least 1, not {gpus}")
    changes = {"per_node": arguments.gpus_per_node} if arguments.gpus_per_node else {}
    device = hardware.device(arguments.gpu, **changes)

    def read(file: str) -> Any:
        return load([f"--job.config_file={file}", *overrides], world_size=gpus)

    if arguments.compare:
        plans = [of_config(read(file), gpus, device) for file in arguments.compare]
        if arguments.json:
            print(json.dumps({"plans": [plan.as_dict() for plan in plans]}))
        else:
            face.show_comparison(plans[0], plans[1], tuple(arguments.compare), _console())
        return 0
    if arguments.search:
        # The file's own layout need not fit this number of devices.
        config = _readable(arguments.config, overrides, gpus)
        result = search(config, gpus, device)
        lines = why(result)
        if arguments.json:
            told = [found.estimate.as_dict() | {"config": found.changes} for found in result.layouts]
            print(json.dumps({"tried": result.tried, "too_large": result.too_large, "why": lines, "layouts": told}))
        else:
            face.show_search(result.layouts, lines, _console())
        if not result.layouts:
            return 1
        best = result.layouts[0]
        if arguments.write:
            _write(arguments.write, best.config(config), gpus)
        if arguments.html:
            Path(arguments.html).write_text(face.page(best.estimate, result.layouts), encoding="utf-8")
        return 0
    config = read(arguments.config)
    plan = of_config(config, gpus, device)
    exact = None
    if arguments.exact:
        from titanlite.plan import dryrun

        exact = dryrun.all_ranks(config, gpus)
    if arguments.json:
        told = plan.as_dict()
        if exact is not None:
            told["exact"] = [each.as_dict() for each in exact]
        print(json.dumps(told))
    else:
        face.show(plan, _console())
        for each in exact or []:
            print(each.text())
    if arguments.html:
        Path(arguments.html).write_text(face.page(plan), encoding="utf-8")
    if arguments.write:
        _write(arguments.write, config, gpus)
    return 0


def _readable(file: str, overrides: list[str], gpus: int) -> Any:
    """The config, with its own degrees where they are legal, else with none."""
    words = [f"--job.config_file={file}", *overrides]
    try:
        return load(words, world_size=gpus)
    except UserError:
        one = [f"--parallelism.{name}_parallel_degree=1" for name in ("tensor", "pipeline", "context")]
        one += ["--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=-1"]
        return load([*words, *one], world_size=gpus)


def _write(file: str, config: Any, gpus: int) -> None:
    values = config.model_dump(exclude_unset=True)
    values.get("job", {}).pop("config_file", None)
    checked = from_dict(values, world_size=gpus)
    Path(file).write_text(to_toml(checked), encoding="utf-8")


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
