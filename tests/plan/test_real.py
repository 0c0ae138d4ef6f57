"""Predicted against measured on real processes: peak memory within 10 %, bytes of every collective equal."""

import os
from collections import Counter

import pytest

from tests.worlds import ranks
from titanlite.config import from_dict
from titanlite.plan.communication import collectives
from titanlite.plan.memory import memory
from titanlite.plan.workload import from_config

VALUES = {
    "training": {"local_batch_size": 4, "seq_len": 128, "mixed_precision_param": "float32"},
    "activation_checkpoint": {"mode": "none"},
}


def _step(values):
    import torch

    from titanlite.data.batch import Batch
    from titanlite.distributed.mesh import Mesh
    from titanlite.distributed.private_fake import apart_from_propagation
    from titanlite.distributed.world import World
    from titanlite.optim.optimizer import Optimizers
    from titanlite.parallel.apply import parallelize
    from titanlite.plan.record import Recorder, local

    config = from_dict(values, world_size=int(os.environ["WORLD_SIZE"]))
    world = World.start(config.comm)
    try:
        mesh = Mesh.build(config, world)
        model = parallelize(config, mesh, world.device)
        optimizers = Optimizers(list(model.parts), config)
        known = [local(t.detach()) for t in (*optimizers.parameters(), *optimizers.named_state().values())]
        tokens = torch.randint(0, 255, (4, 129))
        recorder = Recorder(known)
        with recorder, apart_from_propagation(recorder):
            model.runner.forward_backward(Batch(tokens[:, :-1], tokens[:, 1:], None, None), 1.0)
            optimizers.step()
        peak = max(total for total, _ in recorder.peaks.values())
        traffic = {key: (recorder.calls[key], recorder.bytes[key]) for key in recorder.calls}
        return peak, {key: value for key, value in traffic.items() if key[1] != 1}
    finally:
        model = optimizers = known = recorder = None
        world.close()


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
def test_a_real_step_is_as_predicted(world, tp):
    values = VALUES | {"parallelism": {"tensor_parallel_degree": tp}}
    w = from_config(from_dict(values, world_size=world), world, on_cpu=True)
    calls, count = Counter(), Counter()
    for each in collectives(w):
        calls[each.kind, each.size] += each.calls
        count[each.kind, each.size] += each.bytes
    for peak, traffic in ranks(world).run(_step, values):
        assert traffic == {key: (calls[key], count[key]) for key in calls}
        assert memory(w, 0).total == pytest.approx(peak, rel=0.10)
