"""A folder that cannot be written, from outside."""

from tests.command import run_train

SMALL = (
    "--model.n_layers=2",
    "--model.dim=32",
    "--model.n_heads=2",
    "--training.seq_len=32",
    "--training.global_batch_size=4",
    "--training.local_batch_size=1",
    "--training.mixed_precision_param=float32",
    "--metrics.log_freq=1",
    "--metrics.no-enable_tensorboard",
)


def test_a_folder_that_cannot_be_made_ends_the_run_before_its_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "under"
    done = run_train(*SMALL, "--training.steps=2", f"--job.dump_folder={place}", cwd=tmp_path)
    assert done.code == 2, done.stderr
    assert str(tmp_path / "file") in done.stderr and "Traceback" not in done.stderr
    assert "grad norm" not in done.stdout
