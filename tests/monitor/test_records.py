"""What a run leaves: the contract's names, no step twice, event files that read back; errors in words."""

import json

import pytest
import torch

from tests.command import run_train
from titanlite.models.sizes import DecoderSizes
from titanlite.monitor.explain import explain
from titanlite.monitor.flops import flops_per_token
from titanlite.monitor.journal import Journal

SMALL = (
    "--model.dim=32",
    "--model.n_layers=2",
    "--model.n_heads=2",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--lr_scheduler.warmup_steps=2",
    "--lr_scheduler.total_steps=8",
    "--metrics.log_freq=3",
    "--checkpoint.interval=4",
)
NAMES = {
    "step", "data_step", "loss", "grad_norm", "lr", "tokens_seen", "tokens_per_second", "tokens_per_second_per_device",
    "tflops_per_device", "step_seconds", "data_wait_seconds", "checkpoint_stall_seconds", "memory_peak_gib",
    "memory_peak_percent", "eta_seconds", "time",
}  # fmt: skip


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """A run of 5 steps on pipeline ranks that goes on to 8 in one process; validation every 4."""
    folder = tmp_path_factory.mktemp("twice")
    flags = (
        *SMALL,
        "--validation.enable",
        "--validation.dataset=embedded",
        "--validation.freq=4",
        "--validation.steps=1",
        "--validation.seq_len=32",
        "--validation.local_batch_size=2",
    )
    first = run_train(*flags, "--training.steps=5", "--parallelism.pipeline_parallel_degree=2", nproc=2, cwd=folder)
    assert first.code == 0, first.stderr
    second = run_train(*flags, "--training.steps=8", "--profiling.enable_profiling", "--profiling.profile_freq=2",
                       "--profiling.profiler_warmup=0", "--metrics.norms_freq=3", cwd=folder)  # fmt: skip
    assert second.code == 0, second.stderr
    return first, second


def test_lines_have_the_contracts_names_and_steps_come_once(twice):
    lines = [line for line in twice[1].metrics if "loss" in line]
    assert [line["step"] for line in lines] == [1, 3, 4, 5, 6, 8]
    assert all(line.keys() >= NAMES for line in lines) and "mfu" not in lines[0]
    assert [line["step"] for line in twice[1].metrics if "validation_loss" in line] == [4, 5, 8]


def test_event_files_read_back_with_the_same_numbers(twice):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(twice[1].folder / "tb"))
    read.Reload()
    written = {line["step"]: line for line in twice[1].metrics if "loss" in line}
    for tag in ("loss", "grad_norm", "lr", "tokens_seen"):
        events = read.Scalars(tag)
        assert [event.step for event in events] == sorted(written)
        for event in events:
            assert event.value == pytest.approx(written[event.step][tag], rel=1e-6)
    assert [event.step for event in read.Scalars("validation_loss")] == [4, 5, 8]
    assert "config/text_summary" in read.Tags()["tensors"]


def test_the_console_is_aligned_plain_and_from_one_rank(twice):
    lines = [line for line in twice[0].stdout.splitlines() if line.startswith("step") and "grad norm" in line]
    assert len(lines) == 4 and "\x1b" not in twice[0].stdout
    assert len({line.index("grad norm") for line in lines}) == 1
    assert "metrics.jsonl" in twice[0].stdout and "step-5" in twice[0].stdout


def test_traces_and_norms_are_written_when_asked_for(twice):
    assert list((twice[1].folder / "profile_traces").glob("step_*/rank_0.json"))
    line = next(line for line in twice[1].metrics if line["step"] == 6 and "loss" in line)
    assert {f"norms/{kind}/layers.{i}" for kind in ("weight", "grad") for i in range(2)} <= line.keys()
    squares = [value**2 for name, value in line.items() if name.startswith("norms/grad/")]
    # After the step the gradients are clipped ones.
    assert sum(squares) ** 0.5 == pytest.approx(min(line["grad_norm"], 1.0), rel=1e-3)


def test_the_config_is_kept_and_reads_back(twice):
    from titanlite.config import load

    kept = load([f"--job.config_file={twice[1].folder / 'config.toml'}"], world_size=1)
    assert kept.training.steps == 8 and kept.model.dim == 32


def test_a_journal_cuts_what_comes_again_and_half_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4')
    journal = Journal(file, 2)
    journal.write({"step": 3, "again": True})
    journal.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "again": True},
    ]


def test_flops_are_those_of_the_matmuls():
    from torch.utils.flop_counter import FlopCounterMode

    from titanlite.models.decoder import Decoder

    sizes = DecoderSizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=64)
    tokens = torch.randint(64, (1, 64))
    model = Decoder(sizes)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_total_flops() / 64
    attention = 6 * 2 * 32 * 64
    matmuls = flops_per_token(sizes, 64) - attention - 6 * (2 * 2 * 32 + 32)  # norms' weights are no matmuls
    assert counted in (pytest.approx(matmuls), pytest.approx(matmuls + 2 * attention, rel=0.2))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "the device is out of memory"),
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]"),
            "another rank was lost",
        ),
        (RuntimeError("Timed out waiting 1800000ms for recv operation"), "comm.train_timeout_seconds"),
        (RuntimeError("The server socket has failed to listen: EADDRINUSE"), "MASTER_PORT"),
        (RuntimeError("CUDA error: invalid device ordinal"), "NGPU"),
        (RuntimeError("NCCL error in: ncclSystemError"), "NCCL_DEBUG"),
    ],
)
def test_errors_are_told_in_words(error, told):
    assert told in explain(error)


def test_out_of_memory_comes_with_ways_out_and_what_they_save():
    from titanlite.config import from_dict

    config = from_dict({"model": {"flavor": "8B"}, "activation_checkpoint": {"mode": "none"}}, world_size=8)
    told = explain(torch.OutOfMemoryError("CUDA out of memory"), config, 8)
    assert told.count(" saves ") == 3 and "local_batch_size" in told and "GiB" in told


def test_an_unknown_error_is_not_explained_away():
    assert explain(ValueError("what")) == ""
