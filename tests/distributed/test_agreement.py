"""What agreement costs: one small all-reduce a step, which carries everything."""

from __future__ import annotations

import os

import torch.distributed as dist

from tests.worlds import ranks


def _collectives_of_the_verdict(folder):
    """Every all-reduce over doubles that titanlite itself calls in three steps, in bytes."""
    from titanlite.config import from_dict
    from titanlite.distributed.world import World
    from titanlite.train import Trainer

    table = {
        "job": {"dump_folder": folder},
        "model": {"n_layers": 1, "dim": 32, "n_heads": 2},
        "training": {"seq_len": 16, "global_batch_size": 4, "local_batch_size": 1, "steps": 3},
        "metrics": {"log_freq": 1},
    }
    config = from_dict(table, world_size=int(os.environ["WORLD_SIZE"]))
    world = World.start(config.comm)
    trainer = Trainer(config, world)
    trainer.begin()
    seen, names = [], ("all_reduce", "broadcast", "all_gather", "all_gather_object", "broadcast_object_list", "barrier")
    before = {name: getattr(dist, name) for name in names}

    def counted(name):
        def call(*args, **kwargs):
            seen.append((name, args[0].nbytes if name == "all_reduce" else 0))
            return before[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, counted(name))
        while trainer.goes_on():
            trainer.step()
    finally:
        for name in names:
            setattr(dist, name, before[name])
    trainer.close()
    del trainer
    world.close()
    return seen


def test_a_step_adds_one_small_all_reduce_to_the_model_s_own(tmp_path):
    for seen in ranks(2).run(_collectives_of_the_verdict, str(tmp_path)):
        assert seen == [("all_reduce", 8 * (5 + 2))] * 3
