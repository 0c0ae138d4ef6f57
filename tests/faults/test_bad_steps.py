"""A loss that is not finite, or far too high, stops the run, is skipped, or rolls it back; on all ranks alike."""

from __future__ import annotations

import json

import pytest
import torch

from tests.worlds import ranks

MODEL = {"n_layers": 1, "dim": 32, "n_heads": 2}


def _train(folder, training, faults, steps=8, interval=3):
    """Train on every rank; how it ended, the state, the weights and the journal."""
    import os

    from titanlite.config import from_dict
    from titanlite.distributed.world import World
    from titanlite.errors import TrainingStopped
    from titanlite.train import Trainer

    table = {
        "job": {"dump_folder": folder},
        "model": MODEL,
        "training": {
            "seq_len": 16,
            "global_batch_size": 4,
            "local_batch_size": 1,
            "steps": steps,
            "mixed_precision_param": "float32",
            **training,
        },
        "lr_scheduler": {"total_steps": 20, "warmup_steps": 2},
        "checkpoint": {"enable": True, "interval": interval, "keep_latest_k": 0},
        "metrics": {"log_freq": 1, "enable_tensorboard": True},
        "debug": {"faults": faults},
    }
    config = from_dict(table, world_size=int(os.environ["WORLD_SIZE"]))
    world = World.start(config.comm)
    told = ""
    trainer = Trainer(config, world)
    try:
        trainer.run()
    except TrainingStopped as stop:
        told = str(stop)
    finally:
        trainer.close()
    total = [part.to_local().double().sum().item() for part in trainer.optimizers.named.values()]
    finite = all(torch.isfinite(part.to_local()).all() for part in trainer.optimizers.named.values())
    state = trainer.state
    del trainer
    world.close()
    return told, (state.step, state.data_step, state.skips, state.tokens_seen), finite, total


def _journal(folder):
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "event" in line]


def _same(results):
    assert len({(told, state, finite) for told, state, finite, _ in results}) == 1
    return results[0][:3]


@pytest.mark.parametrize("rank", [0, 1])
def test_stop_ends_before_the_weights_are_touched(rank, tmp_path):
    told, state, finite = _same(ranks(2).run(_train, str(tmp_path), {}, [f"nan@5:{rank}"]))
    assert "step 5" in told and "nan" in told and "on_nonfinite" in told
    assert state == (4, 4, 0, 4 * 64) and finite
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*")) == ["step-3"]


def test_skip_leaves_the_weights_and_goes_on_with_the_next_rows(tmp_path):
    told, state, finite = _same(ranks(2).run(_train, str(tmp_path), {"on_nonfinite": "skip"}, ["nan@5:1"]))
    assert told == "" and state == (8, 8, 1, 7 * 64) and finite
    steps, events = _journal(tmp_path)
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [(line["step"], line["event"]) for line in events] == [(5, "skip")]
    assert "1 of 10" in events[0]["text"] and "nan" in events[0]["text"]


def test_a_step_that_is_skipped_is_as_if_it_had_no_rows(tmp_path):
    """Weights after steps 1 to 3, the third skipped, are those after two steps."""
    settings = {"on_nonfinite": "skip"}
    skipped = ranks(2).run(_train, str(tmp_path / "skipped"), settings, ["nan@3:0"], 3)
    plain = ranks(2).run(_train, str(tmp_path / "plain"), settings, [], 2)
    assert [result[3] for result in skipped] == [result[3] for result in plain]


def test_too_many_skips_end_the_run(tmp_path):
    faults = ["nan@4:1", "nan@5:1", "nan@7:0"]
    told, state, finite = _same(ranks(2).run(_train, str(tmp_path), {"on_nonfinite": "skip", "max_skips": 2}, faults))
    assert "step 7" in told and "max_skips" in told and state[0] == 6 and finite


def test_rollback_returns_to_the_checkpoint_and_passes_the_bad_rows(tmp_path):
    told, state, finite = _same(ranks(2).run(_train, str(tmp_path), {"on_nonfinite": "rollback"}, ["nan@5:1"]))
    # Back from step 5 to the checkpoint of step 3; five batches were taken by then, five more follow.
    assert told == "" and state == (8, 10, 1, 8 * 64) and finite
    steps, events = _journal(tmp_path)
    assert [(line["step"], line["event"]) for line in events] == [(5, "rollback")]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert [line["data_step"] for line in steps] == [1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_rollback_without_a_checkpoint_says_so(tmp_path):
    told, state, _ = _same(ranks(2).run(_train, str(tmp_path), {"on_nonfinite": "rollback"}, ["nan@2:1"]))
    assert "step 2" in told and "no checkpoint" in told


def test_a_spike_is_given_up_like_a_loss_that_is_not_finite(tmp_path):
    settings = {"on_nonfinite": "skip", "spike_threshold": 1.0001, "max_skips": 100}
    told, state, _ = _same(ranks(2).run(_train, str(tmp_path), settings, [], 20))
    steps, events = _journal(tmp_path)
    assert told == "" and state[0] == 20
    mean, spikes = 0.0, []
    for line in steps:
        if mean and line["loss"] > 1.0001 * mean:
            spikes.append(line["step"])
        else:
            mean = 0.95 * (mean or line["loss"]) + 0.05 * line["loss"]
    assert spikes and [line["step"] for line in events] == spikes == [line["step"] for line in events]
    assert state[2] == len(spikes)


def test_events_are_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(2).run(_train, str(tmp_path), {"on_nonfinite": "skip"}, ["nan@2:1"], 3)
    read = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert any("skip" in tag or "event" in tag for tag in read.Tags()["tensors"])
