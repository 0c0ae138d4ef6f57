"""Attention whose queries and keys are normalised a head at a time before they are rotated."""

from __future__ import annotations

from torch import Tensor, nn

from titanlite.models.attention import Attention
from titanlite.models.sizes import DecoderSizes


class NormedAttention(Attention):
    """Grouped-query attention with RMSNorm on the heads of queries and keys."""

    def __init__(self, sizes: DecoderSizes):
        super().__init__(sizes)
        self.q_norm = nn.RMSNorm(sizes.head_dim, sizes.norm_eps)
        self.k_norm = nn.RMSNorm(sizes.head_dim, sizes.norm_eps)

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Each head to unit root mean square, times a learned weight that all heads share."""
        return self.q_norm(q), self.k_norm(k)
