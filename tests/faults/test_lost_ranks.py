"""A process that is killed, again and again: with restarts nothing is lost."""

from __future__ import annotations

import os
import signal

import pytest

from tests.command import run_train, start_train
from tests.faults.drill import FLAGS, STEPS, curve, last_step, slow, until, workers


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    run = run_train(*FLAGS, "--checkpoint.no-enable", cwd=tmp_path_factory.mktemp("straight"))
    assert run.code == 0, run.stderr
    return [loss for _, loss in curve(run.folder)]


def _assert_whole(folder, straight):
    assert [step for step, _ in curve(folder)] == list(range(1, STEPS + 1))
    assert [loss for _, loss in curve(folder)] == pytest.approx(straight, rel=1e-5)


def test_with_restarts_nothing_is_lost(straight, tmp_path):
    run = run_train(*FLAGS, "--debug.faults=kill@7:1", nproc=2, cwd=tmp_path, env={"MAX_RESTARTS": "1"})
    assert run.code == 0, run.stderr
    _assert_whole(run.folder, straight)


def _campaign(kills, straight, folder):
    process = start_train(*FLAGS, slow(0.1), nproc=2, cwd=folder, env={"MAX_RESTARTS": str(kills)})
    before: set[int] = set()
    for kill in range(kills):
        at = last_step(folder / "outputs")
        until(
            lambda at=at: (
                (last_step(folder / "outputs") != at and len(set(workers(process.pid)) - before) == 2)
                or process.poll() is not None
            )
        )
        assert process.poll() is None, (folder / "stderr").read_text()
        found = sorted(set(workers(process.pid)) - before)
        before |= set(found)
        os.kill(found[kill % 2], signal.SIGKILL)
    assert process.wait(300) == 0, (folder / "stderr").read_text()
    _assert_whole(folder / "outputs", straight)


def test_two_restarts_after_kills_from_outside(straight, tmp_path):
    _campaign(2, straight, tmp_path)


@pytest.mark.full
def test_twenty_restarts_after_kills_from_outside(straight, tmp_path):
    _campaign(20, straight, tmp_path)
