"""The private API that titanlite leans on does what it is used for; fails when a torch release changes it."""

from datetime import timedelta

import torch
import torch.distributed as dist

from tests.worlds import ranks, world
from titanlite.distributed import private


def _use():
    from torch.distributed.device_mesh import init_device_mesh

    with world() as started:
        mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
        flat = private.flatten(mesh, ("b", "c"), "bc")
        both = private.concatenate([mesh["a"], flat])
        groups = private.all_groups()
        for group in groups:
            private.set_timeout(timedelta(seconds=77), group)
        one = torch.ones(1)
        dist.all_reduce(one, group=both.get_group("a"))
    private.forget_groups()
    return flat.size(), tuple(both.mesh.shape), len(groups) >= 1, one.item(), started.size


def test_private_functions_work():
    assert ranks(2).run(_use) == [(1, (2, 1), True, 2.0, 2)] * 2
