#!/usr/bin/env python
"""What holds a run back, in words.

python tools/doctor.py outputs                                     # from its metrics
python tools/doctor.py outputs/profile_traces/step_10/rank_0.json  # from a trace
"""

import argparse
import sys
from pathlib import Path

import _environment  # noqa: F401


def main() -> int:
    from titanlite.errors import UserError
    from titanlite.monitor import doctor, runs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a run's folder, its metrics.jsonl, or a trace")
    arguments = parser.parse_args()
    try:
        trace = arguments.path.suffix == ".json"
        findings = doctor.of_trace(arguments.path) if trace else doctor.of_run(runs.read(arguments.path))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(map(str, findings)) or "nothing stands out: the time goes into the model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
