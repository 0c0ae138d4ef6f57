"""Initial weights as a function of (seed, parameter name), whatever the layout.

A random tensor drawn through DTensor on a CPU mesh repeats the same numbers on every shard, and per-rank seeds make
replicas differ; both are silent. Here every value belongs to its place in the full tensor: rows are drawn in blocks,
each block from its own generator seeded by (seed, name, block), and a rank draws just the blocks that touch its shard.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

BLOCK_ELEMENTS = 2**20


@torch.no_grad()
def initialise(model: nn.Module, seed: int, block_std: float, n_layers: int) -> None:
    """Fill every parameter of ``model``, a whole decoder or a pipeline stage of one of ``n_layers`` blocks.

    Norms are 1. Block matrices are normal with ``block_std``, those that write into the residual stream (wo, w2) with
    ``block_std / sqrt(2 n_layers)`` (GPT-2); embedding and output are normal with 0.02.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        std = block_std if name.startswith("layers.") else 0.02
        if name.endswith(("wo.weight", "w2.weight")):
            std /= (2 * n_layers) ** 0.5
        draw_into(parameter, name, seed, std)


def draw_into(parameter: Tensor, name: str, seed: int, std: float) -> None:
    """Fill a matrix, or this rank's shard of one, with its share of the full normal tensor of that name."""
    rows, columns = _places(parameter, 0), _places(parameter, 1)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    width = parameter.shape[1]
    step = max(1, BLOCK_ELEMENTS // width)
    drawn = torch.empty(local.shape)
    for block in rows.div(step, rounding_mode="floor").unique().tolist():
        height = min(step, parameter.shape[0] - block * step)
        values = torch.empty(height, width).normal_(generator=_generator(seed, name, block))
        mine = (rows >= block * step) & (rows < block * step + height)
        values = values[rows[mine] - block * step]
        drawn[mine] = values if len(columns) == width else values[:, columns]
    local.copy_(drawn.mul_(std))


def _places(parameter: Tensor, dim: int) -> Tensor:
    """Which indices of the full tensor's ``dim`` this rank holds: found by sharding the indices the same way."""
    indices = torch.arange(parameter.shape[dim])
    if not isinstance(parameter, DTensor):
        return indices
    mesh = parameter.device_mesh
    placements = [_along(placement, dim) for placement in parameter.placements]
    return distribute_tensor(indices.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local().cpu()


def _along(placement: Placement, dim: int) -> Placement:
    """The placement of the indices of ``dim``, a vector, under a matrix's ``placement``."""
    # FSDP over tensor parallelism shards by a private placement that is no Shard but has its dim.
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    return placement if dim == 0 else Shard(0)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))
