"""Saved on any layout, resumed on any other: the steps that follow are those of a run that was never stopped."""

import itertools
import json

import pytest

from tests.parity.yardstick import LOSS, NORM, Curve, difference, run, settings, together, write_text
from tests.worlds import ranks

LAYOUTS = {
    "one": (1, {}),
    "fsdp2": (2, {"parallelism": {"data_parallel_shard_degree": 2}}),
    "ddp2": (2, {"parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}}),
    "tp2": (2, {"parallelism": {"tensor_parallel_degree": 2}}),
    "cp2": (2, {"parallelism": {"context_parallel_degree": 2}}),
    "pp2": (2, {"parallelism": {"pipeline_parallel_degree": 2}}),
    "zbv2": (2, {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}}),
    "fsdp4": (4, {}),
    "hsdp4": (4, {"parallelism": {"data_parallel_replicate_degree": 2}}),
    "fsdp2 tp2": (4, {"parallelism": {"tensor_parallel_degree": 2}}),
    "fsdp2 pp2": (4, {"parallelism": {"pipeline_parallel_degree": 2}}),
}
SAVED_AT, STEPS = 3, 6
MOVES = [
    ("one", "fsdp4"),
    ("fsdp2", "tp2"),
    ("tp2", "pp2"),
    ("pp2", "one"),
    ("cp2", "hsdp4"),
    ("hsdp4", "fsdp2"),
    ("zbv2", "ddp2"),
    ("ddp2", "zbv2"),
    ("fsdp4", "fsdp2 tp2"),
    ("fsdp2 tp2", "cp2"),
    ("fsdp2 pp2", "one"),
]


def _values(text, folder, layout, steps):
    checkpoint = {"enable": True, "interval": 100, "keep_latest_k": 0}
    extra = LAYOUTS[layout][1]
    return settings(text, folder, steps, checkpoint=checkpoint, lr_scheduler={"total_steps": STEPS}, **extra)


def _train(text, folder, layout, steps) -> Curve:
    return together(ranks(LAYOUTS[layout][0]).run(run, _values(text, folder, layout, steps)))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    return _train(text, str(tmp_path_factory.mktemp("straight")), "one", STEPS)


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    """A run on each layout, stopped after three steps; made when first asked for."""
    made = {}

    def folder(layout):
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("saved")
            _train(text, str(made[layout]), layout, SAVED_AT)
        return made[layout]

    return folder


def _move(source, target, text, straight, saved, tmp_path):
    import shutil

    shutil.copytree(saved(source), tmp_path, dirs_exist_ok=True)
    after = _train(text, str(tmp_path), target, STEPS)
    assert len(after.loss) == STEPS - SAVED_AT
    assert difference(after.loss, straight.loss[SAVED_AT:]) < LOSS
    assert difference(after.norm, straight.norm[SAVED_AT:]) < NORM


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_run_moves_from_layout_to_layout(source, target, text, straight, saved, tmp_path):
    _move(source, target, text, straight, saved, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), itertools.product(LAYOUTS, LAYOUTS))
def test_every_move(source, target, text, straight, saved, tmp_path):
    _move(source, target, text, straight, saved, tmp_path)


def test_every_layout_saves_the_same_names(saved):
    from titanlite.checkpoint import store

    names = {
        layout: set(store.index(saved(layout) / "checkpoint" / f"step-{SAVED_AT}"))
        for layout in ("one", "tp2", "pp2", "zbv2")
    }
    assert len(set(map(frozenset, names.values()))) == 1
    lanes = [json.loads(file.read_text()) for file in saved("fsdp4").glob("checkpoint/step-3/lanes-*.json")]
    assert sorted(int(lane) for part in lanes for lane in part) == list(range(8))
