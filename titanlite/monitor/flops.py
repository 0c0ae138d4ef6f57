"""Floating-point operations of a token, and what devices can do at most."""

from __future__ import annotations

import torch

from titanlite.models.sizes import DecoderSizes

PEAK_BF16 = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
}
"""Dense bf16 peak by a part of the device's name, the more particular first; from the makers' data sheets."""


def flops_per_token(sizes: DecoderSizes, seq_len: int) -> float:
    """Operations of forward and backward for one token: 6 a weight of the matmuls, and causal attention.

    6 (N - N_embedding) + 6 L s d: a weight is multiplied and added once forward and twice backward; scores and weighted
    values cost 12 L s d over all keys, of which a causal token sees half (PaLM, https://arxiv.org/abs/2204.02311, app. B,
    does not halve). Recomputation by activation checkpointing is not counted.
    """
    tables = sizes.vocab_size * sizes.dim
    matmuls = sizes.parameters - (0 if sizes.tie_embeddings else tables)
    return 6.0 * matmuls + 6.0 * sizes.n_layers * sizes.n_heads * sizes.head_dim * seq_len


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of ``device`` in operations a second, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16.items() if all(word in name for word in part.split())), None)
