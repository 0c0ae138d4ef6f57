"""Every use of torch's private API in the distributed code, one function each, with the reason.

Checked against torch 2.11 to 2.14; ``tests/distributed/test_private.py`` fails when one of them goes away.
"""

from __future__ import annotations

import functools
import gc
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group of this rank: there is no public list of them."""
    return [group for group in distributed_c10d._world.pg_map if group is not None]


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Change a group's timeout: public API fixes it at creation, but start-up needs longer than a step."""
    distributed_c10d._set_pg_timeout(timeout, group)


def flight_record() -> bytes:
    """NCCL's flight recorder, pickled, as ``torch.distributed.flight_recorder`` reads it; there is no public dump."""
    from torch._C import _distributed_c10d

    dump = _distributed_c10d._dump_nccl_trace  # type: ignore[attr-defined]  # absent from builds without NCCL
    return dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)


def forget_groups() -> None:
    """Drop what torch remembers of a world that has ended.

    DTensor's sharding decisions name its groups, and would crash in the next world. Other caches hold its meshes, and so
    its groups with their threads, which spin on connections that the peers have closed.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for cached in gc.get_objects():
        if type(cached) is functools._lru_cache_wrapper and (cached.__module__ or "").startswith("torch."):
            cached.cache_clear()


def flatten(mesh: DeviceMesh, dims: tuple[str, ...], name: str) -> DeviceMesh:
    """The one-dimensional mesh over ``dims``: the only way to let one group span several mesh dimensions."""
    return mesh[dims]._flatten(name)


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh whose dimensions are those of ``meshes``, which share a root."""
    return DeviceMesh._concatenate(meshes)
