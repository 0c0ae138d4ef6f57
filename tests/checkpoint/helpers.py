"""A manager over a small state, without a trainer."""

import contextlib

import torch

from titanlite.checkpoint.manager import CheckpointManager, Snapshot
from titanlite.config import from_dict
from titanlite.distributed.world import World


def snapshot(step=0, identity=None, size=64):
    """A state that tells its step in every value."""
    return Snapshot(
        model={"a.weight": torch.full((size, 8), float(step)), "b.weight": torch.full((3,), step + 0.5)},
        optimizer={"a.weight.exp_avg": torch.full((size, 8), -float(step)), "a.weight.step": torch.tensor(float(step))},
        train_state={"step": step},
        lanes={0: {"data_step": step}, 1: {"data_step": step}},
        identity={"model.dim": "8", "data.seed": "0"} | (identity or {}),
    )


@contextlib.contextmanager
def manager(folder, allow_change=False, **settings):
    """A manager of a world of one."""
    config = from_dict({"checkpoint": {"enable": True, **settings}, "data": {"allow_change": allow_change}})
    world = World.start(config.comm)
    made = None
    try:
        made = CheckpointManager(config, world, {"dp_shard": 1}, folder)
        yield made
    finally:
        if made is not None:
            made.close()
        world.close()


def save(folder, *steps, **settings):
    with manager(folder, **settings) as made:
        for step in steps:
            made.save(step, lambda step=step: snapshot(step))
        made.wait()


def resume(folder, **settings):
    """The step that a new start finds, after checking that every value is of that step."""
    with manager(folder, **settings) as made:
        state = snapshot(-1)
        restored = made.restore(state)
    if restored is None:
        return None
    step = restored.step
    expected = snapshot(step)
    for name, tensor in expected.tensors().items():
        assert torch.equal(state.tensors()[name], tensor), name
    assert restored.train_state == {"step": step} and restored.lanes == {0: {"data_step": step}, 1: {"data_step": step}}
    return step


def steps(folder):
    return sorted(int(path.name.split("-")[1]) for path in (folder / "checkpoint").glob("step-*"))
