"""A request to stop, however it comes: the step is finished, a checkpoint published, a marker left, and nothing lost."""

from __future__ import annotations

import os
import signal

import pytest

from tests.command import run_train, start_train
from tests.faults.drill import FLAGS, STEPS, curve, last_step, marker, slow, until, workers
from titanlite.config import from_dict
from titanlite.distributed.elastic import SIGNALS, StopRequest


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    run = run_train(*FLAGS, "--checkpoint.no-enable", cwd=tmp_path_factory.mktemp("straight"))
    assert run.code == 0, run.stderr
    return curve(run.folder)


def _assert_resumes(folder, straight, nproc):
    """What was stopped goes on to the end, and its curve is that of a run that was never stopped."""
    stopped = marker(folder / "outputs")
    assert stopped is not None and stopped["step"] == last_step(folder / "outputs") < STEPS
    assert (folder / "outputs" / "checkpoint" / f"step-{stopped['step']}" / "manifest.json").exists()
    run = run_train(*FLAGS, nproc=nproc, cwd=folder)
    assert run.code == 0, run.stderr
    assert marker(run.folder) is None
    assert [step for step, _ in curve(run.folder)] == list(range(1, STEPS + 1))
    assert [loss for _, loss in curve(run.folder)] == pytest.approx([loss for _, loss in straight], rel=1e-5)
    return stopped


def test_sigterm_to_the_launcher_twice(straight, tmp_path):
    process = start_train(*FLAGS, slow(0.1), nproc=2, cwd=tmp_path)
    until(lambda: last_step(tmp_path / "outputs") >= 2 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0, (tmp_path / "stderr").read_text()
    assert _assert_resumes(tmp_path, straight, 2)["reason"] == "SIGTERM"


def test_one_worker_alone_hears_of_it(straight, tmp_path):
    process = start_train(*FLAGS, slow(0.1), nproc=2, cwd=tmp_path)
    until(lambda: last_step(tmp_path / "outputs") >= 2 or process.poll() is not None)
    os.kill(workers(process.pid)[-1], signal.SIGUSR1)
    assert process.wait(120) == 0, (tmp_path / "stderr").read_text()
    # The layout may change in between.
    _assert_resumes(tmp_path, straight, 1)


def test_the_time_of_the_job_is_used_up(straight, tmp_path):
    run = run_train(*FLAGS, slow(0.3), "--job.max_minutes=0.03", cwd=tmp_path)
    assert run.code == 0, run.stderr
    assert "max_minutes" in _assert_resumes(tmp_path, straight, 1)["reason"]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_changes_nothing(number):
    before = {each: signal.getsignal(each) for each in SIGNALS}
    stop = StopRequest(from_dict({}))
    assert stop.requested == ""
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert stop.requested == number.name
    stop.close()
    try:
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
        os.kill(os.getpid(), signal.SIGTERM)  # a process that is ending is not ended before it has told why
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
