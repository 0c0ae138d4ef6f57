"""The gradient norm over every parallel dimension, and clipping, without a collective of their own.

Each rank sums the squares of the pieces it holds, a piece that several ranks hold counting by its share; the step's one
all-reduce adds the ranks up. Replicated norms under tensor parallelism are counted once that way, and pipeline stages
clip by the norm of the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def square_norm(parameters: Iterable[Tensor], replicas: int) -> Tensor:
    """This rank's part of the squared global gradient norm: fp64, 0-dim; the sum over all ranks is the whole.

    Args:
        parameters: the model's parameters on this rank, with their gradients.
        replicas: the number of ranks that hold the same pipeline stages as this one, itself included.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(replicas // pieces(parameter), []).append(local(parameter.grad))
    device = next((grads[0].device for grads in by_copies.values()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, grads in by_copies.items():
        total += torch.nn.utils.get_total_norm(grads).double() ** 2 / copies
    return total


def scale(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of global norm ``norm`` are multiplied by so that it is at most ``max_norm``; 0 means no limit."""
    if max_norm <= 0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def pieces(parameter: Tensor) -> int:
    """Into how many different pieces a parameter is cut."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(
        mesh.size(dim) for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()
    )
