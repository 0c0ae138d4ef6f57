"""Rotary position embedding in the half-split convention, with Llama 3.1's frequency scaling.

RoFormer, https://arxiv.org/abs/2104.09864. Element ``i`` of a head is rotated with element ``i + head_dim / 2``, as
Hugging Face's Llama does, so weights move between the two by name alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titanlite.models.sizes import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Radians per position of each pair, [head_dim / 2] in fp32.

    Computed where it is used and never stored: a table kept in a buffer is garbage after a model is built on the meta
    device and materialised empty, and nothing would tell.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    base = 1.0 / theta**powers
    if scaling is None:
        return base
    # A frequency that turns often within the first training's context stays, a slow one is stretched by the factor,
    # and those between are mixed.
    turns = scaling.original_max_position_embeddings * base / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return base * (share + (1.0 - share) / scaling.factor)


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine for positions [..., s]: two fp32 tensors [..., s, head_dim]."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [b, h, s, head_dim] by angles [b or 1, 1, s, head_dim]; computed in fp32, returned in x's type."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos + turned * sin).to(x.dtype)
