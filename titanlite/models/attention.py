"""Causal grouped-query attention: the projections, and the kernel that context parallelism replaces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.rotary import frequencies, rotate, rotation
from titanlite.models.sizes import DecoderSizes


class AttentionKernel(nn.Module):
    """Softmax attention without parameters, through ``scaled_dot_product_attention``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attend causally, and only within a document where ``documents`` [b, s] gives each token's.

        q is [b, h, s, d], k and v are [b, kv_heads, s, d]; returns [b, h, s, d].
        """
        grouped = q.shape[1] != k.shape[1]
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        mask = document_mask(documents)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def document_mask(documents: Tensor) -> Tensor:
    """Which key each query may see: its own document's, not after itself. [b, s] -> bool [b, 1, s, s]."""
    size = documents.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=documents.device).tril()
    same = documents[:, :, None] == documents[:, None, :]
    return (same & causal)[:, None]


class Attention(nn.Module):
    """Rotary grouped-query attention (GQA, https://arxiv.org/abs/2305.13245) without biases."""

    def __init__(self, sizes: DecoderSizes):
        super().__init__()
        self.head_dim = sizes.head_dim
        self.rope_theta, self.rope_scaling = sizes.rope_theta, sizes.rope_scaling
        self.wq = nn.Linear(sizes.dim, sizes.n_heads * sizes.head_dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.n_kv_heads * sizes.head_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.n_kv_heads * sizes.head_dim, bias=False)
        self.wo = nn.Linear(sizes.n_heads * sizes.head_dim, sizes.dim, bias=False)
        self.kernel = AttentionKernel()

    def forward(self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """x [b, s, dim] -> [b, s, dim]; ``positions`` and ``documents`` are int64 [b, s], or None for one document."""
        # The number of heads is what this rank's columns give: tensor parallelism leaves a share of them here.
        q, k, v = self.heads(self.wq(x)), self.heads(self.wk(x)), self.heads(self.wv(x))
        q, k = self.normalise(q, k)
        if positions is None:
            positions = torch.arange(q.shape[2], device=q.device)[None]
        cos, sin = rotation(positions, frequencies(self.head_dim, self.rope_theta, self.rope_scaling, q.device))
        q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
        y = self.kernel(q, k, v, documents)
        return self.wo(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """[b, s, heads * head_dim] -> [b, heads, s, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What a family does to queries and keys before they are rotated; Llama does nothing."""
        return q, k
