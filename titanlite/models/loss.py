"""The output head and its loss: cross entropy summed over tokens: plain, in chunks, and over a sharded vocabulary.

The head computes the loss inside its own forward, so that whatever gathers its weight for the forward (FSDP) covers
the loss, and the logits of a whole batch need never exist: for Llama 3's 128,256 tokens they would be larger than all
other activations together.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""The label of a token that does not count."""

CHUNK_BYTES = 64 * 2**20
"""With ``loss_chunks`` auto, fp32 logits of one chunk take at most this."""


class Output(nn.Module):
    """Projection to the vocabulary without bias, and the loss.

    Attributes:
        weight: [vocabulary, dim].
        chunks: into how many pieces the tokens are cut for the loss; 0 chooses by ``CHUNK_BYTES``.
        group: the ranks that hold the other rows of the vocabulary, or None.
        plain: the loss in one piece; the compiler replaces it.
    """

    def __init__(self, dim: int, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.chunks = 0
        self.group: dist.ProcessGroup | None = None
        self.plain: Callable[[Tensor, Tensor, Tensor], Tensor] = plain
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """hidden [b, s, dim] -> logits [b, s, vocabulary], or with labels [b, s] the summed loss, 0-dim fp32."""
        if labels is None:
            return F.linear(hidden, self.weight)
        tokens = hidden.flatten(0, 1)
        return cross_entropy_sum(tokens, self.weight, labels.flatten(), self.chunks, self.group, self.plain)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Summed cross entropy with all logits at once; as ``cross_entropy_sum`` without chunks and group."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=IGNORED, reduction="sum")


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunks: int = 0,
    group: dist.ProcessGroup | None = None,
    whole: Callable[[Tensor, Tensor, Tensor], Tensor] = plain,
) -> Tensor:
    """Sum over the counted tokens of -log softmax(hidden @ weight.T)[label], as a 0-dim fp32 tensor.

    Args:
        hidden: [tokens, dim], the same on every rank of ``group``.
        weight: [rows, dim]; with a group, this rank's consecutive rows of the vocabulary, an equal number on each.
        labels: int64 [tokens]; ``IGNORED`` does not count.
        chunks: pieces of the tokens, of which only one's logits exist at a time; 0 chooses.
        whole: what computes a single piece.

    With a group the gradient to ``hidden`` is this rank's part: the sum over the group is the whole.
    """
    chunks = chunks or math.ceil(labels.numel() * weight.shape[0] * 4 / CHUNK_BYTES)
    if chunks <= 1 and group is None:
        return whole(hidden, weight, labels)
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, max(chunks, 1), group)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy that makes its gradients in the forward pass, chunk by chunk, so that no logits are kept.

    The vocabulary-parallel form is Megatron's (https://arxiv.org/abs/1909.08053, section 3): maximum, sum of
    exponentials and the label's logit are each reduced over the ranks.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunks, group):
        """See ``cross_entropy_sum``."""
        learn = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if learn else hidden
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learn else weight
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        first = 0 if group is None else dist.get_rank(group) * weight.shape[0]
        pieces = zip(hidden.chunk(chunks), labels.chunk(chunks), grad_hidden.chunk(chunks), strict=True)
        for h, label, grad in pieces:
            loss, delta = _softmax_minus_target(F.linear(h, weight).float(), label, first, group)
            total += loss
            if learn:
                delta = delta.to(weight.dtype)
                torch.mm(delta, weight, out=grad)
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(delta.T, h)
                else:
                    grad_weight += delta.T @ h
        if learn:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, *grad_outputs):
        """Scale what the forward pass made."""
        (grad_total,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place: the weight's gradient of a large vocabulary should not exist twice.
        return grad_hidden.mul_(grad_total), grad_weight.mul_(grad_total), *[None] * 3


def _softmax_minus_target(
    logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Summed loss of fp32 logits [tokens, rows], and its gradient to them, which overwrites them."""
    counted = labels != IGNORED
    rows = labels - first
    here = counted & (rows >= 0) & (rows < logits.shape[1])
    rows = rows.where(here, 0)[:, None]
    largest = logits.amax(-1)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    logits -= largest[:, None]
    target = logits.gather(1, rows)[:, 0] * here
    logits.exp_()
    sums = torch.stack((logits.sum(-1), target))
    if group is not None:
        dist.all_reduce(sums, group=group)
    loss = ((sums[0].log() - sums[1]) * counted).sum()
    logits /= sums[0][:, None]
    logits.scatter_add_(1, rows, -here.float()[:, None])
    logits *= counted[:, None]
    return loss, logits
