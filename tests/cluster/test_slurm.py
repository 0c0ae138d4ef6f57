"""``tools/slurm/train.slurm`` on a real SLURM cluster of three virtual nodes, two processes on each of two."""

from __future__ import annotations

import pytest

from tests.cluster.slurm import Cluster, NoSlurm, step
from tests.command import read_metrics, run_train

pytestmark = pytest.mark.slurm

STEPS = 30
FLAGS = (
    "--model.n_layers=1",
    "--model.dim=32",
    "--model.n_heads=2",
    "--training.seq_len=32",
    "--training.global_batch_size=4",
    "--training.local_batch_size=1",
    "--training.mixed_precision_param=float32",
    f"--training.steps={STEPS}",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--metrics.no-enable_tensorboard",
    "--checkpoint.interval=5",
)
# So that signals and crashes meet a run that is under way.
SLOW = "--debug.faults=" + ",".join(f"slow@{number}:0:0.2" for number in range(1, STEPS + 1))


@pytest.fixture(scope="module")
def cluster():
    try:
        made = Cluster()
    except NoSlurm as reason:
        pytest.skip(str(reason))
    yield made
    made.down()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The curve of one process that nothing happens to."""
    run = run_train(*FLAGS, "--checkpoint.no-enable", cwd=tmp_path_factory.mktemp("straight"))
    assert run.code == 0, run.stderr
    return [line["loss"] for line in run.metrics]


def _assert_whole(cluster, job, folder, straight):
    story = cluster.story(folder)
    assert cluster.job(job)["JobState"] == "COMPLETED", story
    lines = [line for line in read_metrics(folder / "outputs") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), story
    assert [line["loss"] for line in lines] == pytest.approx(straight, rel=1e-5)


def _restarts(cluster, job):
    return int(cluster.job(job)["Restarts"])


def test_a_job_that_is_signalled_and_loses_a_node_comes_back_and_loses_nothing(cluster, straight, tmp_path):
    job = cluster.submit(tmp_path, *FLAGS, SLOW)
    cluster.wait(job, lambda: step(tmp_path) >= 3 or cluster.ended(job))
    cluster.call("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@300 does before the time limit
    cluster.wait(job, lambda: _restarts(cluster, job) == 1 or cluster.ended(job))
    stopped = step(tmp_path)
    assert "stopped and saved: requeueing" in cluster.story(tmp_path)
    assert (tmp_path / "outputs" / "checkpoint" / f"step-{stopped}" / "manifest.json").exists()

    cluster.wait(job, lambda: step(tmp_path) >= stopped + 6 or cluster.ended(job))
    lost = cluster.job(job)["BatchHost"][:-1] + "2"
    cluster.call("node", "crash", lost)
    # What a health check does; by itself SLURM takes SlurmdTimeout to notice, as where a node is cut off (below).
    cluster.call("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=crashed")
    cluster.wait(job, lambda: _restarts(cluster, job) == 2 or cluster.ended(job))
    cluster.wait(job, lambda: cluster.ended(job))
    _assert_whole(cluster, job, tmp_path, straight)
    cluster.up()


@pytest.mark.full
def test_the_time_limit_is_no_end(cluster, straight, tmp_path):
    slow = SLOW.replace(":0.2", ":4")
    job = cluster.submit(tmp_path, *FLAGS, slow, options=("--time=2", "--signal=B:USR1@45"))
    cluster.wait(job, lambda: _restarts(cluster, job) >= 1 or cluster.ended(job), 240)
    assert "stopped and saved: requeueing" in cluster.story(tmp_path)
    cluster.wait(job, lambda: cluster.ended(job), 400)
    _assert_whole(cluster, job, tmp_path, straight)


@pytest.mark.full
def test_a_preempted_job_saves_in_the_grace_time_and_comes_back(cluster, straight, tmp_path):
    job = cluster.submit(tmp_path, *FLAGS, SLOW)
    cluster.wait(job, lambda: step(tmp_path) >= 3 or cluster.ended(job))
    urgent = cluster.submit(
        tmp_path / "urgent", *FLAGS, options=("--partition=urgent", "--nodes=3", "--exclusive", "--job-name=urgent")
    )
    cluster.wait(urgent, lambda: cluster.ended(urgent), 240)
    stopped = step(tmp_path)
    assert 3 <= stopped < STEPS
    assert (tmp_path / "outputs" / "checkpoint" / f"step-{stopped}").exists(), cluster.story(tmp_path)
    cluster.wait(job, lambda: cluster.ended(job), 240)
    _assert_whole(cluster, job, tmp_path, straight)


@pytest.mark.full
def test_a_cancelled_job_stays_cancelled(cluster, tmp_path):
    job = cluster.submit(tmp_path, *FLAGS, SLOW)
    cluster.wait(job, lambda: step(tmp_path) >= 3 or cluster.ended(job))
    cluster.call("scancel", job)
    cluster.wait(job, lambda: cluster.ended(job))
    assert cluster.job(job)["JobState"] == "CANCELLED"
    cluster.wait(job, lambda: cluster.job(job).get("EndTime", "Unknown") != "Unknown")
    assert "requeueing" not in cluster.story(tmp_path)
    assert (tmp_path / "outputs" / "checkpoint" / f"step-{step(tmp_path)}").exists()


@pytest.mark.full
def test_a_node_that_is_cut_off_and_heals_damages_nothing(cluster, straight, tmp_path):
    job = cluster.submit(tmp_path, *FLAGS, SLOW)
    cluster.wait(job, lambda: step(tmp_path) >= 7 or cluster.ended(job))
    lost = cluster.job(job)["BatchHost"][:-1] + "2"
    cluster.call("node", "cut", lost)
    cluster.wait(job, lambda: _restarts(cluster, job) == 1 or cluster.ended(job), 240)
    cluster.call("node", "heal", lost)
    cluster.wait(job, lambda: cluster.ended(job), 240)
    _assert_whole(cluster, job, tmp_path, straight)


@pytest.mark.full
def test_a_wrong_config_is_told_once_and_not_requeued(cluster, tmp_path):
    job = cluster.submit(tmp_path, *FLAGS, "--training.stepz=3")
    cluster.wait(job, lambda: cluster.ended(job))
    story = cluster.story(tmp_path)
    assert cluster.job(job)["ExitCode"] == "2:0" and story.count("stepz") == 1, story
    assert not (tmp_path / "outputs").exists()
