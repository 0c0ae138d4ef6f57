"""A real SLURM cluster of virtual nodes on this machine, for tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.command import ROOT

HERE = Path(__file__).parent


class NoSlurm(Exception):
    """SLURM cannot be had here; the message says why."""


class Cluster:
    """Three nodes named ``NAME1`` to ``NAME3``; every command has a time limit, so that nothing here can hang."""

    def __init__(self) -> None:
        # Short: the path of a socket has at most 108 characters.
        self.lab = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.lab.chmod(0o755)  # munged refuses a folder that not everybody may pass
        self.name = f"t{os.getpid()}n"
        self.environment = os.environ | {"LAB": str(self.lab), "NAME": self.name, "NODES": "3"}
        self.jobs: list[str] = []
        try:
            self.up()
        except BaseException:
            self.down()
            raise

    def up(self) -> None:
        """Start what is not running: the cluster, or nodes that crashed."""
        with (self.lab / "up.log").open("a") as log:
            try:
                done = subprocess.run(
                    [HERE / "slurm_up.sh"],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=330,
                )
            except subprocess.TimeoutExpired:
                raise NoSlurm("no SLURM here: setting it up took over 330 s") from None
        if done.returncode:
            raise NoSlurm((self.lab / "up.log").read_text().strip().splitlines()[-1])

    def down(self) -> None:
        """End every process of the cluster."""
        subprocess.run([HERE / "slurm_down.sh"], env=self.environment, stdin=subprocess.DEVNULL, timeout=120)
        shutil.rmtree(self.lab, ignore_errors=True)

    def call(self, *words: str) -> str:
        """Run a client or ``node``; its output."""
        done = subprocess.run(
            [self.lab / "bin" / words[0], *words[1:]],
            env=self.environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def submit(self, folder: Path, *flags: str, options: tuple[str, ...] = ()) -> str:
        """Submit ``train.slurm`` on two nodes with two processes each; the job's number."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "NGPU": "2",
            "OMP_NUM_THREADS": "1",
            "VIRTUAL_ENV": sys.prefix,
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(folder),
        }
        exported = ",".join(["NONE", *(f"{name}={value}" for name, value in settings.items())])
        answer = self.call(
            "sbatch",
            "--parsable",
            f"--export={exported}",
            f"--output={folder}/job.log",
            f"--chdir={ROOT}",
            *options,
            str(ROOT / "tools/slurm/train.slurm"),
            f"--job.dump_folder={folder / 'outputs'}",
            *flags,
        )
        self.jobs.append(answer.strip())
        return self.jobs[-1]

    def job(self, number: str) -> dict[str, str]:
        """What SLURM knows of a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, what: Callable[[], Any], seconds: float = 150) -> None:
        """Wait until ``what()``; a requeued job starts at once instead of after two minutes."""
        deadline = time.monotonic() + seconds
        while not what():
            if time.monotonic() > deadline:
                raise AssertionError(f"job {number} is {self.job(number)['JobState']} after {seconds} s")
            job = self.job(number)
            if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":
                self.call("scontrol", "update", f"JobId={number}", "StartTime=now")
            time.sleep(0.3)

    def ended(self, number: str) -> bool:
        """Whether a job has ended for good."""
        return self.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

    def story(self, folder: Path) -> str:
        """Everything that a job said, for a test's message."""
        files = [folder / "job.log", *sorted((folder / "outputs" / "slurm").glob("*"))]
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in files if file.exists())


def step(folder: Path) -> int:
    """The last step that a job has logged."""
    file = folder / "outputs" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
