"""A rank that makes no progress is named, its stack written down, and the run ended or restarted."""

from __future__ import annotations

import time

from tests.command import run_train
from tests.faults.drill import FLAGS, STEPS, curve
from titanlite.distributed.watchdog import EXIT_CODE

LIMIT = 4
LIMITS = (f"--comm.train_timeout_seconds={LIMIT}", "--comm.init_timeout_seconds=60")


def test_a_hanging_rank_is_told_and_ended(tmp_path):
    run = run_train(*FLAGS, *LIMITS, "--debug.faults=hang@7:1", nproc=2, cwd=tmp_path)
    told = time.time()
    assert run.code in (1, EXIT_CODE)
    assert "rank 1" in run.stderr and "hangs in step 7" in run.stderr, run.stderr
    stack = (run.folder / "comm_traces" / "rank_1.txt").read_text()
    assert "hangs in step 7" in stack and "faults.py" in stack and "before_step" in stack
    # From the last step that was logged to the end of everything.
    assert told - run.metrics[-1]["time"] < LIMIT + 10 + 20, "20 s more than users are promised, for a loaded machine"


def test_a_hang_is_survived_where_restarts_are_allowed(tmp_path):
    flags = (*FLAGS, *LIMITS, "--debug.faults=hang@7:1")
    run = run_train(*flags, nproc=2, cwd=tmp_path, env={"MAX_RESTARTS": "1"})
    assert run.code == 0, run.stderr
    assert [step for step, _ in curve(run.folder)] == list(range(1, STEPS + 1))
    assert "hangs in step 7" in run.stderr
