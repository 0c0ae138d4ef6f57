"""Context parallelism: each rank of the ``cp`` dimension holds a share of every sequence.

Only attention looks across tokens, so only its kernel is replaced, by ring attention (``ring.py``), or, where documents
are kept apart, by attention under a mask over gathered keys and values. Everything else needs to know nothing but the
tokens' positions, which are therefore always explicit. The ranks hold the same weights, so FSDP shards over them too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titanlite.data.batch import Batch
from titanlite.errors import UserError
from titanlite.models.attention import AttentionKernel
from titanlite.models.block import Block
from titanlite.models.decoder import Decoder
from titanlite.parallel.ring import SEQUENCE, Ring, ring_attention

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.mesh import Mesh


def apply(part: Decoder, config: Config, mesh: Mesh) -> None:
    """Give every block of ``part`` an attention kernel that sees the whole sequence."""
    keys = config.parallelism
    ring = Ring(
        group=mesh.dim("cp").get_group(),
        gather=keys.context_parallel_rotate_method == "allgather",
        balanced=keys.context_parallel_load_balancer is not None,
    )
    for block in part.layers.values():
        assert isinstance(block, Block)
        block.attention.kernel = ContextParallelKernel(ring)


def shard(batch: Batch, mesh: Mesh, config: Config) -> Batch:
    """This rank's tokens of every row of ``batch``: [b, s] -> [b, s / cp], with explicit positions.

    ``documents`` keep the whole length, in the order in which the ranks hold the tokens: each rank needs those of the
    keys it attends to, and slicing them once here is cheaper than gathering them in every layer.

    Raises:
        UserError: the sequence cannot be dealt evenly.
    """
    balanced = config.parallelism.context_parallel_load_balancer is not None
    length = batch.tokens.shape[1]
    everyone = token_order(length, mesh.cp, balanced).to(batch.tokens.device)
    mine = everyone.chunk(mesh.cp)[mesh.rank_in("cp")]
    positions = batch.positions
    if positions is None:
        positions = torch.arange(length, device=mine.device).expand(len(batch.tokens), -1)
    return Batch(
        tokens=batch.tokens[:, mine],
        labels=batch.labels[:, mine],
        positions=positions[:, mine],
        documents=None if batch.documents is None else batch.documents[:, everyone],
    )


def token_order(length: int, ranks: int, balanced: bool) -> Tensor:
    """Positions of the tokens as the ranks hold them, rank 0's first: int64 [length].

    >>> token_order(8, 2, balanced=True)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])

    Raises:
        UserError: ``length`` is not a multiple of the number of pieces.
    """
    pieces = ranks * (2 if balanced else 1)
    if length % pieces:
        raise UserError(
            f"a sequence of {length} tokens cannot be dealt to context_parallel_degree = {ranks}: "
            f"it must be a multiple of {pieces}"
        )
    chunks = torch.arange(length).chunk(pieces)
    if not balanced:
        return torch.cat(chunks)
    return torch.cat([chunk for rank in range(ranks) for chunk in (chunks[rank], chunks[pieces - 1 - rank])])


class ContextParallel:
    """A runner that gives another one this rank's share of each sequence."""

    def __init__(self, runner: Any, config: Config, mesh: Mesh):
        self.runner, self.config, self.mesh = runner, config, mesh

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        """As ``Whole.forward_backward``; the loss is that of this rank's tokens."""
        return self.runner.forward_backward(shard(batch, self.mesh, self.config), scale)

    def evaluate(self, batch: Batch) -> Tensor:
        """As ``Whole.evaluate``; the loss is that of this rank's tokens."""
        return self.runner.evaluate(shard(batch, self.mesh, self.config))


class ContextParallelKernel(AttentionKernel):
    """Takes the place of ``AttentionKernel``: queries, keys and values are those of this rank's tokens."""

    def __init__(self, ring: Ring):
        super().__init__()
        self.ring = ring

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """q [b, h, s / cp, d], k and v [b, kv_heads, s / cp, d], documents [b, s] as ``shard`` gives them -> as q."""
        if documents is None:
            return ring_attention(q, k, v, self.ring)
        keys, values = _Gather.apply(torch.stack((k, v)), self.ring)
        mask = self._mask(documents, q.shape[SEQUENCE])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    def _mask(self, documents: Tensor, length: int) -> Tensor:
        """Which of all keys each of this rank's queries may see: bool [b, 1, s / cp, s]."""
        size = documents.shape[1]
        if size != length * self.ring.size:
            raise ValueError(f"documents of {size} tokens for {self.ring.size} ranks of {length}")
        everyone = token_order(size, self.ring.size, self.ring.balanced).to(documents.device)
        here = slice(self.ring.rank * length, (self.ring.rank + 1) * length)
        same = documents[:, here, None] == documents[:, None, :]
        return (same & (everyone[here, None] >= everyone))[:, None]


class _Gather(torch.autograd.Function):
    """Keys and values [2, b, heads, s / cp, d] of all ranks, one behind the other; their gradients are summed home."""

    @staticmethod
    def forward(ctx, mine, ring):
        """All-gather along the sequence."""
        ctx.ring = ring
        everyone = mine.new_empty(ring.size, *mine.shape)
        dist.all_gather_into_tensor(everyone.flatten(0, 1), mine.contiguous(), group=ring.group)
        return torch.cat(tuple(everyone), dim=SEQUENCE + 1)

    @staticmethod
    def backward(ctx, *grads):
        """Reduce-scatter along the sequence."""
        ring = ctx.ring
        pieces = torch.stack(grads[0].chunk(ring.size, dim=SEQUENCE + 1))
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter_tensor(own, pieces.flatten(0, 1), group=ring.group)
        return own, None
