"""Memory of one rank, by part: what stays, what a forward pass leaves for the backward, what buffers come on top.

Counted tensor by tensor from ``models/block.py`` and FSDP2's buffers; the activations follow
https://arxiv.org/abs/2205.05198, section 4, for grouped-query attention, SwiGLU and flash attention. All in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from titanlite.plan.hardware import Device
from titanlite.plan.workload import Stage, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the worst moment of a step.

    Attributes:
        activations: what forward passes left for the backward.
        logits: the head's and the loss's tensors at the worst moment.
        working: what the backward pass of a block needs on top: what it recomputes, and gradients of activations.
        buffers: FSDP's gathered weights and gradients on the way.
        reserved: what the allocator holds and cannot use.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    working: float
    buffers: float
    reserved: float = 0.0

    @property
    def total(self) -> float:
        """All parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    def gib(self) -> dict[str, float]:
        """Every part and the total, in GiB."""
        parts = {field.name: getattr(self, field.name) / 2**30 for field in fields(self)}
        return parts | {"total": self.total / 2**30}


def memory(w: Workload, rank: int, device: Device | None = None) -> Memory:
    """The memory of pipeline rank ``rank`` at the worst of a step's moments.

    The moments: the loss of the last stage, with all activations and the logits; the first block's backward, with
    nearly all activations; the end of the backward, with all gradients; the optimizer's step.
    """
    elements = sum(w.parameters(stage) for stage in w.stages[rank])
    over = w.shards if w.zero == 3 and w.wrapped else 1
    parameters = elements * (w.master_bytes if w.zero == 3 else w.gather_bytes) / over
    state_over = w.data_size * w.cp if w.zero == 1 else over
    extra = w.extra_bytes * elements / state_over
    optimizer = elements * w.state_bytes / state_over + extra
    gradients = elements * w.grad_bytes / over
    if w.offload:
        parameters = gradients = optimizer = 0.0
    kept = activations_in_flight(w, rank)
    head = any(stage.output for stage in w.stages[rank])
    logits = _logits(w) if head else 0.0
    working = block_working(w)
    accumulated = _accumulated(w, elements)
    block, most = w.block, max([0.0, *(w.table for stage in w.stages[rank] if stage.embedding or stage.output)])
    if not (w.wrapped and w.zero == 3):
        gathered_loss = gathered_backward = gathered_end = 0.0
    elif w.gathered_after_forward:
        # Everything stays gathered; the last micro-batch's backward also makes a group's gradients.
        gathered_loss = elements * w.gather_bytes
        gathered_backward = gathered_loss + block * (w.gather_bytes + w.reduce_bytes) * (w.passes == 1)
        gathered_end = gathered_loss + max(block, most) * w.reduce_bytes
    else:
        top = w.table if head else 0.0
        gathered_loss = (2 * block + top) * w.gather_bytes
        gathered_backward = 2 * block * w.gather_bytes + block * (w.gather_bytes + w.reduce_bytes)
        gathered_end = most * (2 * w.gather_bytes + w.reduce_bytes)
    sharded = gradients if not w.early_step else 0.0
    held = gradients if w.zero != 3 else accumulated
    blocks = max(1, sum(stage.blocks for stage in w.stages[rank]))
    moments = [
        (kept, logits, 0.0, gathered_loss, held if w.passes > 1 else 0.0),
        (
            kept,
            0.0,
            working,
            gathered_backward,
            held + sharded * (w.table * head / elements if w.passes == 1 and w.zero == 3 else 0),
        ),
        (kept / blocks, 0.0, working, gathered_end, max(held, sharded) if w.zero == 3 else held),
        (0.0, 0.0, 0.0, 0.0, sharded),
    ]
    activations, at_loss, work, buffers, grads = max(moments, key=sum)
    plain = parameters + optimizer + activations + at_loss + work + buffers + grads
    reserved = 0.0
    if device is not None:
        reserved = device.waste * plain
    return Memory(parameters, grads, optimizer, activations, at_loss, work, buffers, reserved)


def _accumulated(w: Workload, elements: float) -> float:
    """Gradients that wait, unsharded, for the last micro-batch, which alone is reduced; in the reduce type."""
    if w.zero != 3 or w.passes == 1:
        return 0.0
    return elements * (w.reduce_bytes if w.wrapped else w.grad_bytes)


def activations_in_flight(w: Workload, rank: int) -> float:
    """Bytes that forward passes left on a pipeline rank at the worst."""
    stages = w.stages[rank]
    each = [_stage_activations(w, stage) for stage in stages]
    flight = w.in_flight[min(rank, len(w.in_flight) - 1)]
    return flight * sum(each) / max(1, len(each))


def _stage_activations(w: Workload, stage: Stage) -> float:
    again = w.recomputed_blocks(stage)
    kept = again * block_input(w) + (stage.blocks - again) * block_activations(w)
    if stage.output:
        ends = w.tokens * w.sizes.dim * w.compute_bytes
        kept += ends * (2 if w.tp == 1 else 1 + 2 / w.tp)
        if w.loss_chunks == 1 and w.pp > 1:
            kept += 0.0
    return kept


def block_input(w: Workload) -> float:
    """What a recomputed block keeps: its input."""
    return w.tokens * w.sizes.dim * w.compute_bytes / (w.tp if w.sequence_parallel else 1)


def block_activations(w: Workload) -> float:
    """What one block keeps of one micro-batch when it is not recomputed as a whole."""
    s, c, t = w.sizes, w.compute_bytes, w.tokens
    local = 1 / w.tp if w.sequence_parallel else 1.0
    queries, keys = s.n_heads * s.head_dim / w.tp, s.n_kv_heads * s.head_dim / w.tp
    inner = s.ffn_dim / w.tp
    lse = 4 * s.n_heads / w.tp
    if w.recompute == "op":
        # The matmuls but wk and wo (alternating: wq, wv, w1, w2), attention, and with tensor parallelism the scatters.
        scattered = 2 * s.dim * local if w.tp > 1 else 0.0
        wide = inner if w.alternate or not w.gated else 2 * inner
        elements = s.dim * local + 2 * queries + keys + wide + (0 if w.compiled else s.dim) + scattered
        return t * (elements * c + lse)
    wide = 2 * s.dim if w.tp > 1 or not w.compiled or not w.gated else 0.0
    attention = 2 * s.dim * local + 2 * queries + 2 * keys
    feed_forward = inner * ((2 if w.compiled else 4) if w.gated else 2)
    rotation = 8 * s.head_dim * w.seq_len / w.cp * (0 if w.compiled or not w.gated else 1)
    if w.on_cpu:
        # RMSNorm is several operations on the CPU, which keep its input in fp32 and what is normalised.
        wide += 2 * s.dim * local * (4 / c)
    return t * ((wide + attention + feed_forward) * c + lse + 8 * local) + rotation


def block_working(w: Workload) -> float:
    """The backward pass of one block: what it recomputes, and gradients of the widest tensors."""
    s, c, t = w.sizes, w.compute_bytes, w.tokens
    inner = s.ffn_dim / w.tp
    if w.recompute == "none":
        return t * c * (2 * inner + s.dim)
    gradients = t * c * ((2 if w.compiled else 3) * inner + 2 * s.dim)
    whole = block_activations(replace(w, recompute="none"))
    return gradients + whole - (block_activations(w) if w.recompute == "op" else block_input(w))


def _logits(w: Workload) -> float:
    """The head at its worst moment.

    In one piece: logits, their fp32 copy, its log-softmax and the gradient in fp32 and back in the compute type; the
    compiler keeps one fp32 copy less. In chunks (``models/loss.py``): the same of one chunk, the weight's gradient in
    fp32 and the compute type, and the hidden states' gradient.
    """
    rows = w.sizes.vocab_size / (w.tp if w.vocabulary_parallel else 1)
    c = w.compute_bytes
    if w.loss_chunks <= 1 and (w.tp == 1 or not w.vocabulary_parallel or not w.sequence_parallel):
        copies = c + 8 + (0 if w.compiled_loss or c == 4 else c)
        return w.tokens * rows * copies
    weight = w.table * (4 + c)
    chunk = w.tokens / max(1, w.loss_chunks) * rows * (8 + c)
    return weight + chunk + w.tokens * w.sizes.dim * c
