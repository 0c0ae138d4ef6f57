"""Ring attention: exact causal attention over a sequence whose pieces are on different ranks.

https://arxiv.org/abs/2310.01889. Each rank keeps its queries; keys and values come to it, either one piece at a time
from rank to rank ("alltoall": two pieces in memory) or all at once ("allgather": one collective, all pieces in memory).
Attention over each piece is done by the device's fused kernel, and the pieces' results are merged by the log-sum-exp of
their scores, as flash attention does inside. In the backward pass the gradients of keys and values travel along.

Causality leaves half of the pairs of pieces without work. Dealt in order, the last rank would do p times the first
one's; with ``balanced`` each rank has one piece from the head and one from the tail of the sequence, all do as much::

    sequence   0 1 2 3 4 5 6 7        rank 0 has 0 7, rank 1 has 1 6, rank 2 has 2 5, rank 3 has 3 4
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.private_tensor import flash_backward, flash_forward, group_of

SEQUENCE = 2
"""The dimension of the sequence in queries, keys and values [b, heads, s, head_dim]."""


class Ring(NamedTuple):
    """The ranks of a sequence, and how keys and values move between them.

    Attributes:
        group: the ranks, in the order of their pieces.
        gather: whether keys and values are gathered at once instead of passed on.
        balanced: whether a rank's piece is a head and a tail of the sequence.
    """

    group: dist.ProcessGroup
    gather: bool
    balanced: bool

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size()


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
    """Causal attention of this rank's queries q [b, h, s, d] over the keys and values k, v [b, kv_heads, s, d] of all.

    Returns [b, h, s, d].
    """
    return _RingAttention.apply(q, k, v, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring):
        """Merge the attention over every rank's piece."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse, rest = flash_forward(q, k, v, True)
        # Copies: selective checkpointing may keep the kernel's own.
        out, lse = out.to(torch.float32, copy=True), lse.clone()
        for origin, (keys, values) in _pieces((k, v), ring):
            part = _visible(ring, origin, q.shape[SEQUENCE])
            if part is None:
                continue
            mine, theirs = part
            piece, scores, _ = flash_forward(_cut(q, mine), _cut(keys, theirs), _cut(values, theirs), False)
            before = lse[:, :, mine]
            after = torch.logaddexp(before, scores)
            merged = out[:, :, mine]
            merged *= (before - after).exp()[..., None]
            merged += piece * (scores - after).exp()[..., None]
            lse[:, :, mine] = after
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.rest = ring, rest
        return out

    @staticmethod
    def backward(ctx, *grads):
        """Each piece's gradients, with the log-sum-exp of the whole row; those of keys and values go home."""
        ring = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        own = flash_backward(grad, q, k, v, out, lse, True, ctx.rest)
        dq = own[0].float()
        home = _Home(own[1].float(), own[2].float(), ring)
        for origin, (keys, values) in _pieces((k, v), ring):
            part = _visible(ring, origin, q.shape[SEQUENCE])
            if part is None:
                home.add(origin, None, slice(None))
                continue
            mine, theirs = part
            inputs = _cut(q, mine), _cut(keys, theirs), _cut(values, theirs)
            made = flash_backward(
                _cut(grad, mine), *inputs, _cut(out, mine), _cut(lse, mine), False, _rest(ctx.rest, inputs)
            )
            dq[:, :, mine] += made[0]
            home.add(origin, made[1:], theirs)
        dk, dv = home.arrived()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _visible(ring: Ring, origin: int, length: int) -> tuple[slice, slice] | None:
    """Which of this rank's queries see which of ``origin``'s keys, another rank's; None for none."""
    everything = slice(0, length)
    earlier = origin < ring.rank
    if not ring.balanced:
        return (everything, everything) if earlier else None
    half = length // 2
    # An earlier rank's head is before all of ours, its tail after. A later one's pieces are all between our two.
    return (everything, slice(0, half)) if earlier else (slice(half, length), everything)


def _cut(x: Tensor, part: slice) -> Tensor:
    return x[:, :, part].contiguous()


def _rest(rest: tuple, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple:
    """What the kernel's backward needs for pieces of these lengths, from what its forward gave for the whole."""
    if len(rest) == 6:  # CUDA flash: lengths of queries and keys
        return (rest[0], rest[1], inputs[0].shape[SEQUENCE], inputs[1].shape[SEQUENCE], *rest[4:])
    if len(rest) == 3:  # CUDA memory-efficient: a padded log-sum-exp
        padded = -(-inputs[0].shape[SEQUENCE] // 32) * 32
        return (rest[0].new_empty(*rest[0].shape[:2], padded), *rest[1:])
    return rest


def _pieces(tensors: tuple[Tensor, Tensor], ring: Ring):
    """The other ranks' tensors as (rank, tensors), in the order in which they come."""
    if ring.gather:
        mine = torch.stack(tensors)
        everyone = mine.new_empty(ring.size, *mine.shape)
        dist.all_gather_into_tensor(everyone.flatten(0, 1), mine, group=ring.group)
        for distance in range(1, ring.size):
            origin = (ring.rank - distance) % ring.size
            yield origin, tuple(everyone[origin])
        return
    travelling = torch.stack(tensors)
    for distance in range(1, ring.size):
        travelling = _pass_on(travelling, ring)
        yield (ring.rank - distance) % ring.size, tuple(travelling)


class _Home:
    """Gradients of keys and values, fp32, on their way to the rank that the keys and values are from."""

    def __init__(self, dk: Tensor, dv: Tensor, ring: Ring):
        self.ring = ring
        self.own = torch.stack((dk, dv))
        self.travelling: Tensor | None = None
        if ring.gather:
            self.all = self.own.new_zeros(ring.size, *self.own.shape)
            self.all[ring.rank] = self.own

    def add(self, origin: int, grads: tuple[Tensor, Tensor] | None, part: slice) -> None:
        """Add this rank's share for ``part`` of ``origin``'s piece; for every other rank, in ``_pieces``' order."""
        if self.ring.gather:
            target = self.all[origin]
        else:
            before = self.travelling
            target = torch.zeros_like(self.own) if before is None else _pass_on(before, self.ring)
            self.travelling = target
        if grads is not None:
            target[0, :, :, part] += grads[0]
            target[1, :, :, part] += grads[1]

    def arrived(self) -> tuple[Tensor, Tensor]:
        """What all ranks together have for this rank's keys and values."""
        if self.ring.gather:
            dist.reduce_scatter_tensor(self.own, self.all.flatten(0, 1), group=self.ring.group)
        elif self.travelling is not None:
            self.own += _pass_on(self.travelling, self.ring)
        return self.own[0], self.own[1]


def _pass_on(x: Tensor, ring: Ring) -> Tensor:
    """Send to the next rank, receive from the one before."""
    return _to_next(x, ring.group.group_name)


# An operation of its own, so that the compiler, which cannot follow sends and receives, takes it as it is.
@torch.library.custom_op("titanlite::to_next_rank", mutates_args=())
def _to_next(x: Tensor, group_name: str) -> Tensor:
    group = group_of(group_name)
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    return arriving


@_to_next.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x)
