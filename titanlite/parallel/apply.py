"""Every parallelism and memory policy, applied to a plain model in the one order that works.

1. pipeline      first: what follows sees only this rank's blocks
2. float8        swaps linear layers, which tensor parallelism then shards
3. tensor        before FSDP, whose shards are cut from this rank's columns or rows
4. context       replaces the attention kernel, which by now sees this rank's heads
5. compile       per block, before FSDP, whose hooks stay outside the graph
6. activation checkpointing   around the compiled block, whose graph it need not enter; a policy by operation is applied
                 before compile instead, so that the compiler sees what it keeps
7. data          last: FSDP's hooks wrap everything above
8. weights       materialised only now, a shard at a time, with values that no step above can change
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from titanlite.models.decoder import Decoder
from titanlite.models.init import initialise
from titanlite.models.registry import family
from titanlite.models.sizes import sizes_of
from titanlite.parallel import data
from titanlite.parallel.step import Whole

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.mesh import Mesh


@dataclass
class Parallelized:
    """This rank's share of the model, and what runs it.

    Attributes:
        parts: one decoder, or this rank's pipeline stages.
        runner: ``Whole`` or ``Pipelined``: forward_backward(batch, scale) and evaluate(batch).
        after_update: what is left to do after each optimizer step.
    """

    parts: list[Decoder]
    runner: Any
    after_update: Callable[[], None]


def parallelize(config: Config, mesh: Mesh, device: torch.device, *, materialise: bool = True) -> Parallelized:
    """Build the model of ``config`` on the meta device, apply what ``config`` asks for, and give it its weights.

    ``materialise=False`` leaves the weights on the meta device, for a dry run.
    """
    sizes = sizes_of(config.model)
    build = family(config.model.name).build
    with torch.device("meta"), _default_dtype(data.DTYPES[config.training.dtype]):
        if mesh.pp > 1:
            from titanlite.parallel import pipeline

            parts = pipeline.split_stages(config, mesh, build)
        else:
            parts = [build(sizes)]
    for part in parts:
        if part.output is not None and config.training.loss_chunks != "auto":
            part.output.chunks = int(config.training.loss_chunks)
        _apply_in_order(part, config, mesh)
    if materialise:
        for part in parts:
            materialised(part, config, device)
    micro_batch = min(config.training.local_batch_size, rows_per_rank(config, mesh))
    finish = None
    if mesh.tp > 1:
        from titanlite.parallel import tensor

        finish = partial(tensor.sum_partial_gradients, parts, mesh)
    runner: Any
    if mesh.pp > 1:
        runner = pipeline.Pipelined(parts, config, mesh, device, micro_batch, finish)
    else:
        runner = Whole(parts[0], micro_batch, device, finish)
    if mesh.cp > 1:
        from titanlite.parallel.context import ContextParallel

        runner = ContextParallel(runner, config, mesh)
    after_update: Callable[[], None] = _nothing
    if "float8" in config.model.converters:
        from titanlite.parallel import float8

        after_update = partial(float8.after_update, parts, config)
    return Parallelized(parts, runner, after_update)


def _nothing() -> None:
    """Nothing is left to do."""


def rows_per_rank(config: Config, mesh: Mesh) -> int:
    """Rows of the global batch that each data-parallel rank works on."""
    return global_batch_size(config, mesh.data_size) // mesh.data_size


def global_batch_size(config: Config, data_size: int) -> int:
    """Rows of the global batch; -1 in the config means one micro-batch a data-parallel rank."""
    asked = config.training.global_batch_size
    return asked if asked > 0 else config.training.local_batch_size * data_size


def materialised(part: Decoder, config: Config, device: torch.device) -> None:
    """Allocate a part's weights on ``device``, or on the CPU where they are offloaded, and fill them by name."""
    part.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
    part.tie()
    sizes = sizes_of(config.model)
    initialise(part, config.debug.seed or 0, sizes.init_std, sizes.n_layers)


def _apply_in_order(part: Decoder, config: Config, mesh: Mesh) -> None:
    # Imported only when used: together they cost more than the first step of a small model.
    if "float8" in config.model.converters:
        from titanlite.parallel import float8

        float8.convert(part, config, mesh)
    if mesh.tp > 1:
        from titanlite.parallel import tensor

        tensor.apply(part, config, mesh)
    if mesh.cp > 1:
        from titanlite.parallel import context

        context.apply(part, config, mesh)
    from titanlite.parallel import activation_checkpoint, compile

    inside = activation_checkpoint.is_per_operation(config.activation_checkpoint)
    if inside:
        activation_checkpoint.apply(part, config)
    if config.compile.enable:
        compile.apply(part, config, mesh)
    if not inside:
        activation_checkpoint.apply(part, config)
    data.apply(part, config, mesh)


class _default_dtype:
    """Parameters made inside have this type."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(self.before)
