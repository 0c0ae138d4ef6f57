#!/usr/bin/env python
"""Two runs' metrics side by side: the first step where they part, the largest difference, a plot.

    python tools/compare_runs.py outputs/a outputs/b
    python tools/compare_runs.py outputs/a outputs/b --key grad_norm --tolerance 1e-4

Exit code 0 where they agree within the tolerance, 1 where they part, 2 where there is nothing to compare.
"""

import argparse
import sys
from pathlib import Path

import _environment  # noqa: F401


def main() -> int:
    from titanlite.errors import UserError
    from titanlite.monitor import plot, runs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, help="a run's folder, or its metrics.jsonl")
    parser.add_argument("b", type=Path)
    parser.add_argument("--key", default="loss", help="what is compared")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest relative difference that counts as equal"
    )
    arguments = parser.parse_args()
    try:
        first, second = runs.read(arguments.a), runs.read(arguments.b)
        compared = runs.compare(first, second, arguments.key, arguments.tolerance)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(compared.steps)} steps in both, {arguments.key}")
    print(f"largest relative difference {compared.largest:.3g} at step {compared.largest_at}")
    if compared.parted_at is None:
        print(f"they agree within {arguments.tolerance:g}")
    else:
        print(f"they part at step {compared.parted_at}, by more than {arguments.tolerance:g}")
    curves = {"a": runs.curve(first, arguments.key), "b": runs.curve(second, arguments.key)}
    print(plot.text(curves, arguments.key))
    return 0 if compared.parted_at is None else 1


if __name__ == "__main__":
    sys.exit(main())
