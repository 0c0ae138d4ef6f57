"""A process that is lost is named."""

from __future__ import annotations

from tests.command import run_train
from tests.faults.drill import FLAGS


def test_without_restarts_the_lost_rank_is_named(tmp_path):
    run = run_train(*FLAGS, "--debug.faults=kill@7:1", nproc=2, cwd=tmp_path)
    assert run.code not in (0, 2, 3)
    assert "rank 1 on " in run.stderr and "was ended by signal SIGKILL" in run.stderr, run.stderr
    # The one left says where it was, with the error itself below.
    assert "step 7" in run.stderr and "Traceback" in run.stderr, run.stderr
