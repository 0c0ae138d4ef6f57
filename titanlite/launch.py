"""What ``run_train.sh`` runs: checks the config before torch is imported, then trains, under torchrun where need be.

Workers hand their exit code over in a file and exit with 0 (``ending.py``), so that torchrun neither restarts a run
that stopped with a message (2, 3) nor wraps it in reports of its own. Signals are passed on to the workers, which
finish their step, save and end by themselves; torchrun would end them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config import load, to_toml
from titanlite.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from titanlite.config import Config

EXIT_CODES = "TITANLITE_EXIT_CODES"
"""Environment variable with the folder in which workers leave their exit codes."""


def main(argv: list[str]) -> int:
    """Train as ``argv`` and the environment say; returns the exit code: 0, 2, 3, or that of a worker that was lost."""
    try:
        processes = _processes()
        os.environ["NGPU"] = str(processes)
        nodes = _nodes()
        restarts = number("MAX_RESTARTS", 0, least=0)
        _log_ranks()
        config_file = os.environ.get("CONFIG_FILE")
        if config_file and not any(word.split("=")[0] == "--job.config_file" for word in argv):
            argv = [f"--job.config_file={config_file}", *argv]
        config = load(argv)
        mode = os.environ.get("COMM_MODE") or "default"
        if mode not in ("default", "fake_backend"):
            raise UserError(f"environment variable COMM_MODE must be fake_backend or default, not {mode!r}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if config.job.print_config:
        print(to_toml(config))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // processes)))
    if mode == "fake_backend" or config.comm.mode == "fake_backend" or config.memory_estimation.enable:
        return _dry_run(config, processes * nodes[1])
    if processes == 1 and nodes == (1, 1) and restarts == 0:
        from titanlite import train

        return train.main(argv)
    return _torchrun(argv, processes, nodes, restarts)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def number(name: str, default: int, least: int = 1) -> int:
    """A whole number from an environment variable.

    Raises:
        UserError: naming the variable.
    """
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"environment variable {name} must be a whole number from {least} on, not {text!r}")
    return int(text)


def _processes() -> int:
    """Processes on this machine: NGPU, else the number of GPUs, else 1."""
    if os.environ.get("NGPU"):
        return number("NGPU", 1)
    if shutil.which("nvidia-smi") is None:
        return 1
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return max(1, sum(line.startswith("GPU ") for line in listed.splitlines()))


def _nodes() -> tuple[int, int]:
    """Fewest and most nodes: NNODES is a number or min:max."""
    text = os.environ.get("NNODES") or "1"
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts) or int(parts[0]) > int(parts[-1]):
        raise UserError(f"environment variable NNODES must be a number of nodes or min:max, not {text!r}")
    return int(parts[0]), int(parts[-1])


def _log_ranks() -> None:
    text = os.environ.setdefault("LOG_RANK", "0")
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise UserError(f"environment variable LOG_RANK must be ranks separated by commas, not {text!r}")


def _dry_run(config: Config, world_size: int) -> int:
    from titanlite.plan import dryrun

    try:
        return dryrun.main(config, world_size)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _torchrun(argv: list[str], processes: int, nodes: tuple[int, int], restarts: int) -> int:
    """Run the workers of this node under torchrun's agent, in this process."""
    try:
        backend, endpoint, settings = _rendezvous(nodes)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2

    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    # What torchrun would say of a failure is said below, in fewer words; its modules set their levels themselves.
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="titanlite-") as folder:
        told = Path(folder, "told")
        told.mkdir()
        os.environ[EXIT_CODES] = str(told)
        launch = LaunchConfig(
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            nproc_per_node=processes,
            run_id=os.environ.get("RUN_ID") or ("titanlite" if nodes[1] > 1 else uuid.uuid4().hex),
            rdzv_backend=backend,
            rdzv_endpoint=endpoint,
            rdzv_configs=settings,
            max_restarts=restarts,
            local_addr="127.0.0.1" if nodes == (1, 1) else None,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder, "logs"))),
            # Signals that end a run gently are relayed; these end it at once.
            signals_to_handle="SIGHUP,SIGQUIT",
        )
        _relay_signals()
        try:
            launch_agent(launch, sys.executable, ["-u", "-m", "titanlite.train", *argv])
        except ChildFailedError as error:
            return _words(told) or _lost(error)
        except SignalException as error:
            return 128 + int(error.sigval)
        return _words(told)


def _words(told: Path) -> int:
    """The exit code of the workers that ended with words, 0 where none did; prints words that no rank showed."""
    stopped: dict[int, tuple[int, str]] = {}
    for file in told.iterdir():
        code, _, message = file.read_text().partition("\n")
        if code != "0":
            stopped[int(file.name)] = int(code), message
    shown = {int(rank) for rank in os.environ["LOG_RANK"].split(",")}
    if stopped and not shown & stopped.keys():
        rank = min(stopped)
        print(f"rank {rank}: {stopped[rank][1]}", file=sys.stderr)
    return max((code for code, _ in stopped.values()), default=0)


def _lost(error: ChildFailedError) -> int:
    """Name the workers that were lost; their own output stands above."""
    ranks = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    failures = [failure for _, failure in ranks]
    for rank, failure in ranks:
        if failure.exitcode < 0:
            how = f"was ended by signal {signal.Signals(-failure.exitcode).name}"
        else:
            how = f"ended with exit code {failure.exitcode}"
        who = f"rank {rank} on {socket.gethostname()} (local rank {failure.local_rank})"
        print(f"titanlite: {who} {how}", file=sys.stderr)
    code = failures[0].exitcode if failures else 1
    return code if code > 0 else 128 - code


def _rendezvous(nodes: tuple[int, int]) -> tuple[str, str, dict]:
    """torchrun's rendezvous: backend, endpoint and settings."""
    if nodes == (1, 1) and not os.environ.get("MASTER_ADDR"):
        return "c10d", "127.0.0.1:0", {"is_host": True}
    port = number("MASTER_PORT", 29500 if nodes[1] > 1 else 0, least=0)
    endpoint = f"{os.environ.get('MASTER_ADDR') or '127.0.0.1'}:{port}"
    if nodes == (1, 1):
        return "c10d", endpoint, {"is_host": True}
    if not os.environ.get("MASTER_ADDR"):
        raise UserError("several nodes need MASTER_ADDR: the name or address of the first one")
    if nodes[0] == nodes[1] and os.environ.get("NODE_RANK"):
        return "static", endpoint, {"rank": number("NODE_RANK", 0, least=0)}
    settings = {"is_host": number("NODE_RANK", 0, least=0) == 0} if os.environ.get("NODE_RANK") else {}
    return "c10d", endpoint, settings


def _relay_signals() -> None:
    """Pass the signals that ask a run to stop on to the workers."""

    def relay(signum: int, frame: object) -> None:
        for pid in _children():
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                pass

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, relay)


def _children() -> list[int]:
    """The processes that this one started."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids += [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:
            continue
    return pids


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
