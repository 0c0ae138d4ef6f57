"""A disk that fills up during a save: the run says so, the checkpoint before stays intact, the exit code tells."""

import os
import subprocess

import pytest

from tests.command import ROOT, command, environment, read_metrics

SMALL = (
    "--model.dim=64",
    "--model.n_layers=2",
    "--model.n_heads=4",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.steps=6",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--metrics.no-enable_tensorboard",
    "--checkpoint.interval=2",
    "--checkpoint.keep_latest_k=0",
)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB: room for one checkpoint of 1.7 MiB and not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("needs to be allowed to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_stops_or_warns_and_loses_nothing(small_disk, tmp_path, mode):
    flags = (*SMALL, f"--job.dump_folder={small_disk}", f"--checkpoint.async_mode={mode}")
    done = subprocess.run(
        command(*flags, cwd=tmp_path), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 3, done.stderr
    assert "No space left" in done.stderr and "Traceback" not in done.stderr
    reached = read_metrics(small_disk)[-1]["step"]
    assert reached == 6 if mode == "async" else reached < 6
    intact = subprocess.run(
        ["python", str(ROOT / "tools" / "verify_checkpoint.py"), str(small_disk / "checkpoint")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert intact.returncode == 0 and "step-2: intact" in intact.stdout, intact.stdout
    assert not list((small_disk / "checkpoint").glob("*.tmp"))
