"""Private API behind a world that exists only in one process: fake process groups and fake tensors.

Checked against torch 2.11 to 2.14; ``tests/plan`` runs on it and fails when any of it goes away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from titanlite.distributed import private


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    """The default process group of ``size`` ranks seen from ``rank``; nothing is sent, results are left as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    world = dist.group.WORLD
    assert world is not None
    try:
        yield world
    finally:
        dist.destroy_process_group()
        private.forget_groups()


def fake_tensors() -> Any:
    """A context in which tensors have a shape and a type and no memory: there is no public form of it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def no_pipeline_warmup() -> Iterator[None]:
    """Stages take the shapes they were told as true, instead of voting on it over the wire, which a fake group cannot.

    torch before 2.13 has no vote; there the shapes are true already.
    """
    from torch.distributed.pipelining import schedules

    base: Any = schedules._PipelineSchedule
    before = base.__dict__.get("_warmup_p2p")
    if before is None:
        yield
        return

    def told(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]

    base._warmup_p2p = told
    try:
        yield
    finally:
        base._warmup_p2p = before


def size_of_group(argument: Any) -> int | None:
    """Ranks of the process group that a collective's argument names, or None where it names none."""
    if isinstance(argument, str):
        try:
            return torch._C._distributed_c10d._resolve_process_group(argument).size()  # type: ignore[arg-type]
        except (RuntimeError, KeyError, ValueError):
            return None
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument).size()
        except (RuntimeError, TypeError):
            return None
    return None


def in_backward() -> bool:
    """Whether a backward pass is running: public API does not tell."""
    return torch._C._current_autograd_node() is not None


@contextlib.contextmanager
def apart_from_propagation(recorder: Any) -> Iterator[None]:
    """Set ``recorder.paused`` while DTensor finds out shapes: it runs operations on fake tensors of the global shape."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    kind: Any = ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    before = getattr(kind, name)

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        paused, recorder.paused = recorder.paused, True
        try:
            return before(self, *args, **kwargs)
        finally:
            recorder.paused = paused

    setattr(kind, name, unseen)
    try:
        yield
    finally:
        setattr(kind, name, before)
