"""Publication, retention, failures and asynchronous saves."""

import os
import threading

import pytest
import torch

from tests.checkpoint.helpers import manager, resume, save, snapshot, steps
from titanlite.checkpoint import saver
from titanlite.errors import TrainingStopped, UserError


@pytest.mark.parametrize(
    ("keep", "every", "left"), [(0, None, [1, 2, 3, 4, 5]), (1, None, [5]), (2, None, [4, 5]), (2, 2, [2, 4, 5])]
)
def test_retention(tmp_path, keep, every, left):
    save(tmp_path, 1, 2, 3, 4, 5, keep_latest_k=keep, keep_every=every)
    assert steps(tmp_path) == left
    assert resume(tmp_path) == 5


def test_broken_folders_do_not_count_towards_what_is_kept(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoint" / "step-9").mkdir()
    save(tmp_path, 2, keep_latest_k=2)
    assert steps(tmp_path) == [1, 2, 9]


def test_the_clock_is_asked_beside_a_save_in_flight(tmp_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()
    write = saver.store.write

    def slow(folder, tensors, group):
        begun.set()
        assert go.wait(60)
        write(folder, tensors, group)

    monkeypatch.setattr(saver.store, "write", slow)
    with manager(tmp_path, async_mode="async", time_interval_minutes=1) as made:
        assert not made.due(1)
        made.save(1, lambda: snapshot(1))
        assert begun.wait(60)
        monkeypatch.setattr(made, "gather", lambda value: pytest.fail("the clock used the group of the save"))
        assert not made.due(2)
        made.written_at -= 61
        assert made.due(3)
        monkeypatch.undo()
        go.set()
        made.wait()
    assert resume(tmp_path) == 1


def test_weights_alone_do_not_push_out_what_a_run_can_go_on_from(tmp_path):
    with manager(tmp_path, keep_latest_k=1, last_save_model_only=True) as made:
        for step in (1, 2):
            made.save(step, lambda step=step: snapshot(step))
        made.save(3, lambda: snapshot(3), last=True)
    assert steps(tmp_path) == [2, 3] and resume(tmp_path) == 2


def test_a_rollback_goes_to_this_runs_own_newest(tmp_path):
    save(tmp_path, 5, 10)
    with manager(tmp_path, load_step=5) as made:
        assert made.restore(snapshot(-1)).step == 5
        assert made.restore(snapshot(-1)).step == 5
        made.save(7, lambda: snapshot(7))
        state = snapshot(-1)
        assert made.restore(state).step == 7 and state.model["a.weight"][0, 0] == 7


def test_a_rollback_never_returns_to_what_a_run_was_started_from(tmp_path):
    save(tmp_path / "first", 4)
    with manager(tmp_path / "second", initial_load_path=str(tmp_path / "first" / "checkpoint")) as made:
        assert made.restore(snapshot(-1)).step == 0
        assert made.restore(snapshot(-1)) is None


def test_a_state_that_is_not_finite_pushes_nothing_out(tmp_path):
    save(tmp_path, 1, keep_latest_k=1)
    bad = snapshot(2)
    bad.optimizer["a.weight.exp_avg"][3, 3] = float("inf")
    with manager(tmp_path, keep_latest_k=1) as made, pytest.raises(TrainingStopped, match=r"exp_avg is not finite"):
        made.save(2, lambda: bad)
    assert steps(tmp_path) == [1] and resume(tmp_path) == 1


def test_saving_a_step_again_replaces_it_whole(tmp_path):
    save(tmp_path, 1, 2)
    with manager(tmp_path, load_step=1) as made:
        made.restore(snapshot(-1))
        again = snapshot(2)
        again.model["b.weight"].fill_(9.0)
        made.save(2, lambda: again)
    with manager(tmp_path) as made:
        state = snapshot(-1)
        assert made.restore(state).step == 2 and state.model["b.weight"][0] == 9.0
    assert steps(tmp_path) == [1, 2]


def test_a_failed_save_again_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)

    def full(folder, tensors, group):
        (folder / "__0_0.distcp").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver.store, "write", full)
    with manager(tmp_path, load_step=1) as made:
        made.restore(snapshot(-1))
        with pytest.raises(TrainingStopped, match=r"step 2 could not be saved.*No space left on device"):
            made.save(2, lambda: snapshot(2))
    monkeypatch.undo()
    assert resume(tmp_path) == 2
    assert not list((tmp_path / "checkpoint").glob("*.tmp"))


@pytest.mark.parametrize(
    ("mode", "policy", "stops"), [("async", "auto", False), ("async", "stop", True), ("disabled", "warn", False)]
)
def test_a_failed_save_does_what_the_policy_says(tmp_path, monkeypatch, capsys, mode, policy, stops):
    def full(folder, tensors, group):
        raise OSError(28, "No space left on device")

    with manager(tmp_path, async_mode=mode, on_save_error=policy) as made:
        made.save(1, lambda: snapshot(1))
        made.wait()
        monkeypatch.setattr(saver.store, "write", full)
        if stops:
            with pytest.raises(TrainingStopped, match="No space left"):
                made.save(2, lambda: snapshot(2))
                made.wait()
        else:
            made.save(2, lambda: snapshot(2))
            made.wait()
            assert "training goes on" in capsys.readouterr().err
            with pytest.raises(TrainingStopped, match="No space left"):
                made.save(3, lambda: snapshot(3), last=True)
    assert resume(tmp_path) == 1


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_the_optimizer_never_races_an_asynchronous_save(tmp_path, monkeypatch, mode):
    begun, go = threading.Event(), threading.Event()
    write = saver.store.write

    def slow(folder, tensors, group):
        begun.set()
        assert go.wait(60)
        write(folder, tensors, group)

    monkeypatch.setattr(saver.store, "write", slow)
    with manager(tmp_path, async_mode=mode) as made:
        for step in (1, 2):
            begun.clear(), go.clear()
            state = snapshot(step)
            made.save(step, lambda state=state: state)
            assert begun.wait(60)
            for tensor in state.tensors().values():
                tensor.fill_(77.0)
            state.lanes[0]["data_step"] = 77
            state.train_state["step"] = 77
            go.set()
            made.wait()
    assert resume(tmp_path) == 2
    assert resume(tmp_path, load_step=1) == 1


def test_a_run_that_lost_its_lease_publishes_nothing(tmp_path):
    with manager(tmp_path) as old:
        old.save(1, lambda: snapshot(1))
        config, world = old.config, old.world
        new = type(old)(config, world, {"dp_shard": 1}, tmp_path)
        with pytest.raises(TrainingStopped, match="another run"):
            old.save(2, lambda: snapshot(2))
        new.save(3, lambda: snapshot(3))
    assert steps(tmp_path) == [1, 3] and resume(tmp_path) == 3


def test_the_last_save_may_hold_weights_alone(tmp_path, capsys):
    with manager(tmp_path, last_save_model_only=True, export_dtype="bfloat16") as made:
        made.save(1, lambda: snapshot(1))
        live = snapshot(2)
        made.save(2, lambda: live, last=True)
    assert live.model["a.weight"].dtype == torch.float32
    from titanlite.checkpoint import store

    stored = store.index(tmp_path / "checkpoint" / "step-2")
    assert {dtype for _, dtype in stored.values()} == {torch.bfloat16}
    assert all(name.startswith("model.") for name in stored)
    assert resume(tmp_path) == 1
    assert "weights alone" in capsys.readouterr().err


def test_starting_from_another_runs_weights(tmp_path):
    save(tmp_path / "first", 4)
    path = str(tmp_path / "first" / "checkpoint")
    with manager(tmp_path / "second", initial_load_path=path) as made:
        state = snapshot(-1)
        restored = made.restore(state)
    assert restored.step == 0 and not restored.train_state and not restored.lanes
    assert state.model["a.weight"][0, 0] == 4 and state.optimizer["a.weight.exp_avg"][0, 0] == 1
    with manager(tmp_path / "third", initial_load_path=path, initial_load_model_only=False) as made:
        state = snapshot(-1)
        restored = made.restore(state)
    assert restored.step == 4 and state.optimizer["a.weight.exp_avg"][0, 0] == -4


def test_what_is_excluded_is_not_loaded(tmp_path):
    save(tmp_path, 4)
    with manager(tmp_path, exclude_from_loading=["optimizer", "dataloader", "train_state"]) as made:
        state = snapshot(-1)
        restored = made.restore(state)
    assert state.model["a.weight"][0, 0] == 4 and state.optimizer["a.weight.exp_avg"][0, 0] == 1
    assert restored.train_state == {} and restored.lanes == {}


def test_load_only_saves_nothing(tmp_path):
    save(tmp_path, 4)
    with manager(tmp_path, load_only=True) as made:
        assert made.restore(snapshot(-1)).step == 4
        made.save(5, lambda: snapshot(5), last=True)
        assert not made.due(500)
    assert steps(tmp_path) == [4]


def test_a_folder_that_cannot_be_written_is_told_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"), manager(tmp_path / "file" / "under"):
        pass


def test_the_written_bytes_are_the_states(tmp_path):
    size = 200_000
    with manager(tmp_path) as made:
        state = snapshot(1, size=size)
        made.save(1, lambda: state)
    held = sum(t.numel() * t.element_size() for t in state.tensors().values())
    written = sum(os.path.getsize(path) for path in (tmp_path / "checkpoint" / "step-1").iterdir())
    assert held <= written <= 1.02 * held
