"""One transformer block: pre-normalised attention and SwiGLU feed-forward, each added to the residual stream."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.attention import Attention
from titanlite.models.sizes import DecoderSizes


class FeedForward(nn.Module):
    """SwiGLU, https://arxiv.org/abs/2002.05202: w1 gates, w3 goes up, w2 comes down."""

    def __init__(self, sizes: DecoderSizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)
        self.w2 = nn.Linear(sizes.ffn_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, dim] -> [b, s, dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """RMSNorm (https://arxiv.org/abs/1910.07467), attention, RMSNorm, feed-forward."""

    def __init__(self, sizes: DecoderSizes, attention: type[Attention] = Attention):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, sizes.norm_eps)
        self.attention = attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, sizes.norm_eps)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """x [b, s, dim] -> [b, s, dim]; ``positions`` and ``documents`` as in ``Attention``."""
        x = x + self.attention(self.attention_norm(x), positions, documents)
        return x + self.feed_forward(self.ffn_norm(x))
