"""Norms of weights and gradients by block, every ``metrics.norms_freq`` steps."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.distributed.world import World
from titanlite.optim.gradients import local, pieces


def by_block(named: Iterable[tuple[str, nn.Parameter]], n_layers: int, replicas: int, world: World) -> dict[str, float]:
    """Global norms as "norms/weight/layers.3" and "norms/grad/layers.3"; a collective over the whole world.

    Pipeline ranks hold different blocks, so every rank fills a vector over all of them and the sum is the whole.
    """
    groups = [f"layers.{i}" for i in range(n_layers)] + ["tok_embeddings", "norm", "output"]
    place = {name: i for i, name in enumerate(groups)}
    squares = torch.zeros(2, len(groups), dtype=torch.float64)
    for name, parameter in named:
        parts = name.split(".")
        group = place[".".join(parts[:2]) if parts[0] == "layers" else parts[0]]
        copies = replicas // pieces(parameter)
        squares[0, group] += _square(parameter.detach()) / copies
        if parameter.grad is not None:
            squares[1, group] += _square(parameter.grad) / copies
    squares = squares.to(world.device)
    if world.size > 1:
        dist.all_reduce(squares)
    kinds = ("weight", "grad")
    return {
        f"norms/{kind}/{group}": math.sqrt(value)
        for kind, row in zip(kinds, squares.tolist(), strict=True)
        for group, value in zip(groups, row, strict=True)
        if value > 0
    }


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(local(tensor)).double() ** 2)
