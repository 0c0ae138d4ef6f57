"""What is saved of a rank, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.store import MODEL, OPTIMIZER


@dataclass
class Snapshot:
    """This rank's live state, for saving or to be filled.

    Attributes:
        model: parameters by fully qualified name.
        optimizer: optimizer state by "name.key".
        lanes: loader state of this rank's rows; empty on ranks whose rows another rank reports.
        identity: what a run must have in common with the checkpoint to load it.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    train_state: dict[str, Any]
    lanes: dict[int, Any]
    identity: dict[str, str]

    def tensors(self, model: bool = True, optimizer: bool = True) -> dict[str, Tensor]:
        """The tensors under their names in the store."""
        flat = {MODEL + name: tensor.detach() for name, tensor in self.model.items()} if model else {}
        return flat | ({OPTIMIZER + name: tensor for name, tensor in self.optimizer.items()} if optimizer else {})


@dataclass
class Restored:
    """What a checkpoint held beside tensors, and in words where it came from."""

    step: int
    train_state: dict[str, Any] = field(default_factory=dict)
    lanes: dict[int, Any] = field(default_factory=dict)
    note: str = ""


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_not_finite(tensors: dict[str, Tensor]) -> str:
    """The first name whose values on this rank are not all finite, or ""."""
    for name, tensor in tensors.items():
        piece = local(tensor)
        # One pass without a copy: the largest magnitude is nan or inf where any value is.
        if (
            piece.numel()
            and piece.is_floating_point()
            and not torch.isfinite(torch.linalg.vector_norm(piece, torch.inf))
        ):
            return name
    return ""
