"""How a rank ends: exit codes, errors in words, quiet ranks, and a process group that is always closed."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from titanlite.config import Config
from titanlite.distributed.world import World
from titanlite.errors import TrainingStopped, UserError


@dataclass
class Ending:
    """How it went.

    Attributes:
        world: set as soon as there is one, so that it is closed whatever happens.
        config: what runs, for the ways out of an error.
        code: 0 done, 2 wrong input, 3 could not go on, 1 a fault of ours or a lost peer.
        message: what a code of 2 or 3 came with.
        step: the step that was running, 0 before the first.
    """

    world: World | None = None
    config: Config | None = None
    code: int = 0
    message: str = ""
    step: int = 0


@contextlib.contextmanager
def ending() -> Iterator[Ending]:
    """Run what is inside; turn what it raises into words and an exit code.

    Ranks that are not in LOG_RANK are quiet. A message that all ranks raise alike is printed by those that speak; an
    error of any rank is printed with its traceback.
    """
    if _told_before():
        raise SystemExit(0)
    end = Ending()
    spoken = _quieten()
    try:
        yield end
    except (UserError, TrainingStopped) as stop:
        end.code = 2 if isinstance(stop, UserError) else 3
        end.message = str(stop)
        print(stop, file=sys.stderr, flush=True)
    except SystemExit as stop:
        end.code = stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:
        end.code = 1
        _tell(error, end, spoken)
    finally:
        _close(end)
        _hand_over(end)


def _close(end: Ending) -> None:
    gc.collect()
    if end.world is not None:
        if end.code in (0, 2, 3):
            end.world.close()
        else:
            end.world.abandon()


def _hand_over(end: Ending) -> None:
    """Leave the exit code for the launcher where it asked for it, and end with 0: torchrun would restart or wrap."""
    sys.stdout.flush()
    folder = os.environ.get("TITANLITE_EXIT_CODES")
    if folder and end.code in (0, 2, 3):
        rank = os.environ.get("RANK", "0")
        (Path(folder) / rank).write_text(f"{end.code}\n{end.message}")
        end.code = 0


def _told_before() -> bool:
    """Whether a rank of this machine ended with words already; torchrun restarts those whose peer left, to no avail."""
    folder = os.environ.get("TITANLITE_EXIT_CODES")
    return folder is not None and any(not file.read_text().startswith("0") for file in Path(folder).iterdir())


def _quieten() -> int | None:
    """Send the output of a rank that is not in LOG_RANK nowhere; returns a handle on the real standard error."""
    speaking = os.environ.get("LOG_RANK", "0").split(",")
    if "RANK" not in os.environ or os.environ["RANK"] in (rank.strip() for rank in speaking):
        return None
    spoken = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush(), sys.stderr.flush()
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    # The watchdog speaks for a rank that hangs, even a quiet one.
    sys.__stderr__ = os.fdopen(os.dup(spoken), "w")  # type: ignore[misc]
    os.close(nowhere)
    return spoken


def _tell(error: BaseException, end: Ending, spoken: int | None) -> None:
    """What happened in words, the error itself below."""
    from titanlite.monitor.explain import explain

    words = explain(error, end.config, end.world.size if end.world is not None else 1)
    who = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}, step {end.step}"
    text = "".join(traceback.format_exception(error))
    os.write(2 if spoken is None else spoken, f"titanlite: {who}: {words}\n{text}".encode())
