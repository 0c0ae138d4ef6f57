"""Worlds start, agree and end, several times in one process."""

import torch

from tests.worlds import ranks, world
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.verdict import agree


def _mesh(parallelism):
    from titanlite.config import from_dict

    with world() as started:
        config = from_dict({"parallelism": parallelism}, world_size=started.size)
        mesh = Mesh.build(config, started)
        return mesh.describe(), mesh.data_rank, mesh.data_size, tuple(mesh.fsdp.mesh.shape)


def test_what_is_left_is_sharded():
    found = ranks(4).run(_mesh, {"tensor_parallel_degree": 2})
    assert found[0][0] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert [rank for _, rank, *_ in found] == [0, 0, 1, 1]


def test_the_shards_span_context_and_the_copies_come_first():
    found = ranks(4).run(_mesh, {"context_parallel_degree": 2})
    assert [(rank, size, shape) for _, rank, size, shape in found] == [(0, 2, (4,))] * 2 + [(1, 2, (4,))] * 2
    found = ranks(4).run(_mesh, {"data_parallel_replicate_degree": 2})
    assert [(rank, size, shape) for _, rank, size, shape in found] == [(i, 4, (2, 2)) for i in range(4)]


def _agree():
    with world() as started:
        one = started.rank == 1
        return agree(
            started, torch.tensor(3.0), 2, 8.0, stop=one, data_ended=False, seconds=1.0 + one, nominal_tokens=8
        )


def test_every_rank_hears_the_same_verdict():
    first, second = ranks(2).run(_agree)
    assert first == second
    assert first.loss == 1.5 and first.tokens == 4 and first.stop and not first.data_ended
    assert first.grad_norm == 8.0
    assert (first.step_seconds_mean, first.step_seconds_spread) == (1.5, 0.5)


def _nan_on_one_rank():
    with world() as started:
        loss = torch.tensor(float("nan") if started.rank == 1 else 1.0)
        return agree(started, loss, 1, 1.0, False, False, 0.0, 1).finite


def test_one_rank_that_sees_nan_is_heard_by_all():
    assert ranks(2).run(_nan_on_one_rank) == [False, False]
