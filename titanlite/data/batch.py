"""Rows of tokens with their labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Rows for one data-parallel rank; every tensor is int64 [rows, seq_len].

    Attributes:
        labels: the token after each; -100 does not count.
        positions, documents: place within, and number of, each token's document; None where rows are one document.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None

    def split(self, rows: int) -> list[Batch]:
        """The micro-batches of ``rows`` rows."""
        return [self.rows(slice(i, i + rows)) for i in range(0, len(self.tokens), rows)]

    def rows(self, which: slice) -> Batch:
        """Some of the rows."""
        return Batch(*(None if t is None else t[which] for t in self._tensors()))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        """The same rows on another device, copied without waiting where the memory is pinned."""
        return Batch(*(None if t is None else t.to(device, non_blocking=True) for t in self._tensors()))  # type: ignore[arg-type]

    def counted_tokens(self) -> int:
        """How many labels count."""
        return int((self.labels != IGNORED).sum())

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self.tokens, self.labels, self.positions, self.documents
