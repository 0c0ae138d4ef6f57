"""Killed at any moment and started again: the loss curve is that of a run that was never stopped."""

import os
import random
import signal
import time

import pytest

from tests.command import read_metrics, run_train, start_train

FLAGS = (
    "--model.dim=64",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--training.seq_len=32",
    "--training.global_batch_size=4",
    "--training.local_batch_size=1",
    "--training.steps=40",
    "--lr_scheduler.warmup_steps=5",
    "--metrics.log_freq=1",
    "--metrics.no-enable_tensorboard",
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest_k=2",
    "--checkpoint.async_mode=async",
    "--debug.faults=slow@3:0:0.01",
)


def _workers(pid):
    """The processes below ``pid`` that train."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as children:
            for child in map(int, children.read().split()):
                found += [child, *_workers(child)]
    return found


def _kill(process, whom, rng):
    workers = _workers(process.pid)
    victims = {
        "one": rng.sample(workers, min(1, len(workers))),
        "all": workers,
        "launcher": [process.pid],
    }[whom]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait(120)
    # What the killed launcher left behind must be gone before the next start, as on a node that was cleaned up.
    for pid in workers:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _campaign(tmp_path, kills, seed):
    rng = random.Random(seed)
    whole = run_train(*FLAGS, nproc=2, cwd=tmp_path / "whole")
    assert whole.code == 0, whole.stderr
    expected = {line["step"]: (line["loss"], line["grad_norm"]) for line in whole.metrics}
    folder = tmp_path / "killed"
    seen = {}
    for i in range(kills):
        begun = max(seen, default=0)
        process = start_train(*FLAGS, nproc=2, cwd=folder)
        # Between the start and some steps on, so that kills fall into starts, steps and saves.
        goal = begun + rng.randint(0, 6)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            lines = read_metrics(folder / "outputs")
            if lines and lines[-1]["step"] >= goal:
                break
            time.sleep(0.02)
        time.sleep(rng.random() * 0.15)
        if process.poll() is None:
            _kill(process, ("one", "all", "launcher")[i % 3], rng)
        for line in read_metrics(folder / "outputs"):
            seen[line["step"]] = (line["loss"], line["grad_norm"])
            assert seen[line["step"]] == expected[line["step"]], f"step {line['step']} after {i + 1} kills"
    last = run_train(*FLAGS, nproc=2, cwd=folder)
    assert last.code == 0, last.stderr
    assert [line["step"] for line in last.metrics] == list(range(1, 41))
    assert {line["step"]: (line["loss"], line["grad_norm"]) for line in last.metrics} == expected


def test_eight_kills_lose_nothing(tmp_path):
    _campaign(tmp_path, 8, seed=1)


@pytest.mark.full
def test_fifty_kills_lose_nothing(tmp_path):
    _campaign(tmp_path, 50, seed=2)
