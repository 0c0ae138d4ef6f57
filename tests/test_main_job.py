"""The main job from outside: ``./run_train.sh`` trains, resumes and gives one loss curve on every layout."""

import math

import pytest

from tests.command import run_train

STRONG = (
    "--model.init_std=0.15",
    "--model.n_layers=2",
    "--model.dim=64",
    "--model.n_heads=4",
    "--training.seq_len=64",
    "--training.global_batch_size=8",
    "--training.mixed_precision_param=float32",
    "--training.max_norm=0.5",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--metrics.no-enable_tensorboard",
)


UNSAVED = ("--checkpoint.no-enable",)


def _curve(run):
    assert run.code == 0, run.stderr
    return [(line["loss"], line["grad_norm"]) for line in run.metrics]


def _assert_same(curve, other):
    assert len(curve) == len(other)
    for (loss, norm), (other_loss, other_norm) in zip(curve, other, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-5)
        assert norm == pytest.approx(other_norm, rel=1e-4)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return _curve(run_train(*STRONG, *UNSAVED, "--training.steps=6", cwd=tmp_path_factory.mktemp("one")))


LAYOUTS = {
    "fsdp": (2, ()),
    "ddp": (2, ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")),
    "hsdp": (4, ("--parallelism.data_parallel_replicate_degree=2",)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_parallel_layouts_give_the_curve_of_one_process(layout, one_process, tmp_path):
    processes, flags = LAYOUTS[layout]
    micro = {"fsdp": 2, "ddp": 1, "hsdp": 1}[layout]
    run = run_train(
        *STRONG,
        *UNSAVED,
        *flags,
        "--training.steps=6",
        f"--training.local_batch_size={micro}",
        nproc=processes,
        cwd=tmp_path,
    )
    _assert_same(_curve(run), one_process)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_the_micro_batch_does_not_enter_the_curve(micro, one_process, tmp_path):
    run = run_train(*STRONG, *UNSAVED, "--training.steps=6", f"--training.local_batch_size={micro}", cwd=tmp_path)
    _assert_same(_curve(run), one_process)


def test_a_resumed_run_equals_a_straight_one(tmp_path):
    flags = (*STRONG, "--checkpoint.interval=100", "--lr_scheduler.total_steps=8")
    straight = _curve(run_train(*flags, "--training.steps=8", cwd=tmp_path / "straight"))
    first = run_train(*flags, "--training.steps=4", cwd=tmp_path / "twice")
    assert _curve(first) == straight[:4]
    second = run_train(*flags, "--training.steps=8", cwd=tmp_path / "twice")
    assert second.code == 0, second.stderr
    assert [line["step"] for line in second.metrics] == list(range(1, 9))
    assert [(line["loss"], line["grad_norm"]) for line in second.metrics] == straight


def test_the_debug_model_learns(tmp_path):
    run = run_train("--training.steps=30", "--metrics.log_freq=1", "--lr_scheduler.warmup_steps=5", cwd=tmp_path)
    losses = [loss for loss, _ in _curve(run)]
    assert losses[0] == pytest.approx(math.log(320), rel=0.03)
    assert losses[-1] < 0.75 * losses[0]
    assert "metrics.jsonl" in run.stdout and "checkpoint" in run.stdout
