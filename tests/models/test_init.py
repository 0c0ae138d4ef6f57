"""Initial weights depend on seed and name alone."""

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from tests.worlds import ranks, world
from titanlite.models import init


def _full(width: int) -> torch.Tensor:
    weight = torch.empty(96, width)
    init.draw_into(weight, "layers.0.attention.wq.weight", 7, 0.5)
    return weight


def _sharded(dim: int, width: int) -> torch.Tensor:
    from torch.distributed.device_mesh import init_device_mesh

    init.BLOCK_ELEMENTS = 100
    with world() as started:
        mesh = init_device_mesh("cpu", (started.size,))
        weight = distribute_tensor(torch.empty(96, width), mesh, [Shard(dim)], src_data_rank=None)
        init.draw_into(weight, "layers.0.attention.wq.weight", 7, 0.5)
        return weight.full_tensor()


def test_every_sharding_draws_the_same_values(monkeypatch):
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 100)
    for width in (30, 31):
        whole = _full(width)
        for dim in (0, 1):
            for sharded in ranks(2).run(_sharded, dim, width):
                assert torch.equal(sharded, whole)


def test_blocks_of_rows_differ_and_have_the_asked_deviation():
    weight = torch.empty(4096, 512)
    init.draw_into(weight, "output.weight", 0, 0.02)
    assert abs(weight.std().item() / 0.02 - 1) < 0.01
    assert not torch.equal(weight[:2048], weight[2048:])
    other = torch.empty(4096, 512)
    init.draw_into(other, "output.weight", 1, 0.02)
    assert not torch.equal(weight, other)
