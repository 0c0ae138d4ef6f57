"""What is lost is named, and a run goes on with the nodes that are left."""

from __future__ import annotations

import pytest

from tests.command import run_train
from tests.faults.drill import FLAGS, STEPS, curve


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    run = run_train(*FLAGS, "--checkpoint.no-enable", cwd=tmp_path_factory.mktemp("straight"))
    assert run.code == 0, run.stderr
    return [loss for _, loss in curve(run.folder)]


def _assert_whole(folder, straight):
    assert [step for step, _ in curve(folder)] == list(range(1, STEPS + 1))
    assert [loss for _, loss in curve(folder)] == pytest.approx(straight, rel=1e-5)


def test_without_restarts_the_lost_rank_is_named(tmp_path):
    run = run_train(*FLAGS, "--debug.faults=kill@7:1", nproc=2, cwd=tmp_path)
    assert run.code not in (0, 2, 3)
    assert "rank 1 on " in run.stderr and "was ended by signal SIGKILL" in run.stderr, run.stderr
    # The one left says where it was, with the error itself below.
    assert "step 7" in run.stderr and "Traceback" in run.stderr, run.stderr
