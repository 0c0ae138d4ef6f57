#!/usr/bin/env python
"""A running or finished run: curves, throughput, memory, checkpoints, events.

python tools/watch.py outputs                       # live, until Ctrl-C
python tools/watch.py outputs --once                # as it stands
python tools/watch.py outputs --html run.html       # one self-contained page
"""

import argparse
import sys
import time
from pathlib import Path

import _environment  # noqa: F401


def main() -> int:
    from rich.console import Console
    from rich.live import Live

    from titanlite.errors import UserError
    from titanlite.monitor import page, runs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--once", action="store_true", help="print once and end")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    parser.add_argument("--seconds", type=float, default=2.0, help="from one look at the run to the next")
    arguments = parser.parse_args()
    try:
        run = runs.read(arguments.run)
        if arguments.html:
            arguments.html.write_text(page.html_page(run), encoding="utf-8")
            print(arguments.html)
            return 0
        if arguments.once or not sys.stdout.isatty():
            Console(width=None if sys.stdout.isatty() else 100).print(page.terminal(run))
            return 0
        with Live(page.terminal(run), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(arguments.seconds)
                live.update(page.terminal(runs.read(arguments.run)), refresh=True)
    except KeyboardInterrupt:
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
