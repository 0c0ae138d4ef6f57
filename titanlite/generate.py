"""Sampling from a decoder, a token at a time, with keys and values of the tokens before kept (KV cache)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.models.attention import AttentionKernel
from titanlite.models.decoder import Decoder


class CachedKernel(AttentionKernel):
    """Attention that remembers the keys and values of earlier calls; each call's tokens come after those."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.padding: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """As ``AttentionKernel``; ``padding`` [b, keys] hides the places before a row's first token."""
        if self.keys is not None and self.values is not None:
            k, v = torch.cat((self.keys, k), 2), torch.cat((self.values, v), 2)
        self.keys, self.values = k, v
        new, whole = q.shape[2], k.shape[2]
        mask = torch.ones(new, whole, dtype=torch.bool, device=q.device).tril(whole - new)[None, None]
        if self.padding is not None:
            # A place that is padding itself may see itself: a softmax over nothing would be nan.
            alone = torch.eye(whole, dtype=torch.bool, device=q.device)[whole - new :]
            mask = (mask & ~self.padding[:, None, None, :whole]) | alone
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """A token for each row of logits [b, vocabulary]; temperature 0 takes the likeliest.

    Nucleus sampling, https://arxiv.org/abs/1904.09751: the fewest tokens whose probabilities reach ``top_p``.
    """
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.float() / temperature).softmax(-1)
    ranked, order = probabilities.sort(-1, descending=True)
    ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
    picked = torch.multinomial(ranked.cpu(), 1, generator=generator).to(order.device)
    return order.gather(-1, picked)[:, 0]


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: list[list[int]],
    tokens: int,
    eos: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    heard: Callable[[Tensor], Tensor] = lambda chosen: chosen,
    multiple: int = 1,
) -> list[list[int]]:
    """Continue each prompt by at most ``tokens`` tokens, up to and without ``eos``.

    Prompts of different lengths are padded on the left; padding is hidden from attention and from positions.

    Args:
        heard: makes the choice the same on all ranks that hold pieces of the model.
        multiple: each call's tokens are padded to a multiple of this: the tensor-parallel degree, which cuts sequences.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    longest = math.ceil(max(map(len, prompts)) / multiple) * multiple
    rows = torch.tensor([[eos] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    missing = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=device)
    places = torch.arange(longest, device=device)[None]
    padding, positions = places < missing, (places - missing).clamp(min=0)
    filler = torch.full((len(prompts), multiple - 1), eos, device=device)
    kernels = [CachedKernel() for _ in model.layers]
    blocks: list[Any] = list(model.layers.values())
    before = [block.attention.kernel for block in blocks]
    try:
        for block, kernel in zip(blocks, kernels, strict=True):
            block.attention.kernel = kernel
        made: list[list[int]] = [[] for _ in prompts]
        done = [False] * len(prompts)
        for _ in range(tokens):
            for kernel in kernels:
                kernel.padding = padding
            logits = model(rows, positions=positions)[:, -1]
            chosen = heard(choose(logits, temperature, top_p, generator))
            for i, token in enumerate(chosen.tolist()):
                done[i] = done[i] or token == eos
                if not done[i]:
                    made[i].append(token)
            if all(done):
                break
            rows, positions = torch.cat((filler, chosen[:, None]), 1), positions[:, -1:].expand(-1, multiple) + 1
            padding = torch.cat((padding, filler == filler, torch.zeros_like(chosen[:, None], dtype=torch.bool)), 1)
        return made
    finally:
        for block, kernel in zip(blocks, before, strict=True):
            block.attention.kernel = kernel
