"""``./run_train.sh`` as a black box."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Run:
    """A run that has ended."""

    code: int
    stdout: str
    stderr: str
    folder: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)


def environment(nproc: int = 1, env: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a run: the interpreter of the tests, one thread a process, nothing of a run around it."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CONFIG_FILE")
    base = {
        name: value for name, value in os.environ.items() if name not in drop and not name.startswith("TORCHELASTIC")
    }
    base |= {"PATH": f"{Path(sys.executable).parent}:{base['PATH']}", "NGPU": str(nproc), "OMP_NUM_THREADS": "1"}
    base["VIRTUAL_ENV"] = sys.prefix
    return base | (env or {})


def command(*args: str, cwd: Path) -> list[str]:
    """The command line, with the run's folder under ``cwd`` unless ``args`` name one."""
    cwd.mkdir(parents=True, exist_ok=True)
    given = any(arg.startswith("--job.dump_folder") for arg in args)
    return [str(ROOT / "run_train.sh"), *([] if given else [f"--job.dump_folder={cwd / 'outputs'}"]), *args]


def run_train(*args: str, cwd: Path, nproc: int = 1, env: dict[str, str] | None = None, timeout: float = 300) -> Run:
    """Run to the end."""
    done = subprocess.run(
        command(*args, cwd=cwd),
        cwd=cwd,
        env=environment(nproc, env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr, cwd / "outputs", read_metrics(cwd / "outputs"))


def start_train(*args: str, cwd: Path, nproc: int = 1, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start, and leave running; output goes to ``cwd/stdout`` and ``cwd/stderr``."""
    words = command(*args, cwd=cwd)
    with open(cwd / "stdout", "a") as out, open(cwd / "stderr", "a") as err:
        return subprocess.Popen(words, cwd=cwd, env=environment(nproc, env), stdout=out, stderr=err, text=True)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without a half-written last one."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
