"""How long a step takes: a roofline over classes of operations, the pipeline's bubble, and communication that shows.

Williams et al., https://doi.org/10.1145/1498765.1498785: a kernel takes the longer of its arithmetic at the achievable
rate and its bytes at the achievable bandwidth. All in seconds of the slowest pipeline rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from titanlite.plan.communication import Collective, collectives, seconds
from titanlite.plan.hardware import Device
from titanlite.plan.workload import Stage, Workload


@dataclass(frozen=True)
class Time:
    """Seconds of a step, by what they go to."""

    matmuls: float
    attention: float
    elementwise: float
    optimizer: float
    tensor_parallel: float
    data_parallel: float
    other_communication: float
    bubble: float

    @property
    def total(self) -> float:
        """All parts."""
        return sum(asdict(self).values())


def step_time(w: Workload, device: Device) -> Time:
    """The step of the slowest pipeline rank; the others wait for it."""
    # Ranks with the same blocks and no end take the same time.
    ranks = {
        tuple((s.blocks, s.embedding, s.output, w.recomputed_blocks(s)) for s in stages): rank
        for rank, stages in enumerate(w.stages)
    }
    return max((_rank_time(w, device, rank) for rank in ranks.values()), key=lambda time: time.total)


def _rank_time(w: Workload, device: Device, rank: int) -> Time:
    parts = [_stage_compute(w, device, stage) for stage in w.stages[rank]]
    matmuls, attention, elementwise = (w.passes * sum(part[i] for part in parts) for i in range(3))
    compute = matmuls + attention + elementwise
    found = collectives(w, rank)
    spent = {c: seconds(c, device, w) for c in found}
    tensor = sum(time * (1 - w.overlap_tp) for c, time in spent.items() if c.dimension == "tp")
    if w.async_tp:
        tensor *= 0.4  # https://discuss.pytorch.org/t/209487: what decomposed collectives leave to be seen
    other = sum(time for c, time in spent.items() if c.dimension == "cp" and not c.overlaps)
    other += sum(max(0.0, time - 0.9 * attention) for c, time in spent.items() if c.dimension == "cp" and c.overlaps)
    other += sum(time for c, time in spent.items() if c.dimension == "pp") * 0.5
    data = _data_parallel(
        w, compute, {c: t for c, t in spent.items() if c.dimension in ("fsdp", "dp_replicate")}, device
    )
    busy = compute + tensor + other
    bubble = busy * w.bubble / (1 - w.bubble)
    return Time(matmuls, attention, elementwise, _optimizer(w, device, rank), tensor, data, other, bubble)


def _data_parallel(w: Workload, compute: float, spent: dict[Collective, float], device: Device) -> float:
    """What of FSDP's or DDP's communication shows.

    Gathers hide behind the passes they are ahead of, reductions behind the last micro-batch's backward; the first
    gather and the last reduction have nothing to hide behind, and computing beside a collective is slower.
    """
    gathers = sum(t for c, t in spent.items() if c.kind == "all_gather" and c.overlaps)
    reduces = sum(t for c, t in spent.items() if c.kind != "all_gather" and c.overlaps)
    shown = sum(t for c, t in spent.items() if not c.overlaps)
    last_backward = compute / w.passes * 2 / 3
    if w.zero == 3:
        once = w.pp > 1 and w.gathered_after_forward
        hidden_by = compute / w.passes / 3 if once else compute
        shown += max(0.0, gathers - hidden_by) + max(0.0, reduces - last_backward)
        groups = max([1.0, *(c.calls for c in spent if c.kind == "reduce_scatter")])
        ends = gathers / max(1.0, max([1.0, *(c.calls for c in spent if c.kind == "all_gather")])) + reduces / groups
    else:
        shown += max(0.0, reduces - last_backward) + max(0.0, gathers - last_backward / 2)
        ends = reduces / max([1.0, *(c.calls for c in spent)])
    beside = min(compute, gathers + reduces)
    return shown + ends + device.slowdown * beside


def _stage_compute(w: Workload, device: Device, stage: Stage) -> tuple[float, float, float]:
    """Seconds of one micro-batch's forward and backward: matmuls, attention, everything else."""
    again = w.recomputed_blocks(stage)
    s, t = w.sizes, w.tokens
    matmul = _block_matmuls(w, device)
    partly = (0.5 if w.alternate else 0.12) if w.recompute == "op" else 0.0
    matmuls = matmul * (stage.blocks * (3 + partly) + again)
    if stage.output:
        head = _matmul(device, t, s.dim, s.vocab_size / (w.tp if w.vocabulary_parallel else 1), w.compute_bytes, False)
        matmuls += 3 * head
    # Causal: half of 4 t s h d forward; the backward pass multiplies five times instead of twice.
    flops = 2 * t * w.seq_len * s.n_heads * s.head_dim / w.tp
    attention = (
        (stage.blocks * 3.5 + again)
        * flops
        / (device.peak(w.compute_bytes) * device.attention_share * w.attention_speed)
    )
    moved = _block_bytes(w) * (stage.blocks * (3 + (1 if w.recompute == "op" else 0)) + again)
    if stage.output:
        rows = s.vocab_size / (w.tp if w.vocabulary_parallel else 1)
        moved += t * rows * (20 if w.compiled else 32)
    launches = (stage.blocks * (14 if w.compiled else 40) * 3 + again * 14) * device.launch * 0.2
    return matmuls, attention, moved / (device.memory_bandwidth * device.memory_share) + launches


def _block_matmuls(w: Workload, device: Device) -> float:
    """Seconds of one block's matmuls forward, of which the backward pass does twice as many."""
    s, t, c = w.sizes, w.tokens, w.compute_bytes
    queries, keys, inner = s.n_heads * s.head_dim / w.tp, s.n_kv_heads * s.head_dim / w.tp, s.ffn_dim / w.tp
    shapes = [(s.dim, queries), (s.dim, keys), (s.dim, keys), (queries, s.dim), (inner, s.dim)]
    shapes += [(s.dim, inner)] * (2 if w.gated else 1)
    return sum(_matmul(device, t, k, n, c, w.float8) for k, n in shapes)


def _matmul(device: Device, m: float, k: float, n: float, width: int, float8: bool) -> float:
    """[m, k] @ [k, n]: arithmetic or bytes, whichever is longer; float8 also casts its inputs.

    A multiplication with a short side fills the device less: tiles of 128 or 256 (https://docs.nvidia.com/deeplearning/
    performance/dl-performance-matrix-multiplication), hence ``side / (side + 128)`` for the shorter of k and n.
    """
    filled = min(k, n) / (min(k, n) + 128) * m / (m + 256)
    rate = device.peak_fp8 * device.fp8_share if float8 else device.peak(width) * device.matmul_share
    moved = width * (m * k + k * n + m * n) / (device.memory_bandwidth * device.memory_share)
    time = max(2 * m * k * n / (rate * filled), moved)
    if float8:
        time += 3 * (m * k + k * n) / (device.memory_bandwidth * device.memory_share)
    return time + device.launch * 0.2


def _block_bytes(w: Workload) -> float:
    """Bytes that a block's operations other than matmuls and attention move, forward.

    Eager, each operation reads and writes: norms, fp32 rotation, SiLU and the product, the residual. Compiled, chains
    are one pass.
    """
    s, c, t = w.sizes, w.compute_bytes, w.tokens
    local = s.dim / (w.tp if w.sequence_parallel else 1)
    heads = (s.n_heads + s.n_kv_heads) * s.head_dim / w.tp
    inner = s.ffn_dim / w.tp
    if w.compiled:
        return t * (local * 6 * c + heads * 2 * c + inner * 3 * c)
    rotation = heads * (48 if w.gated else 0)
    return t * (local * 10 * c + rotation + inner * (5 if w.gated else 2) * c)


def _optimizer(w: Workload, device: Device, rank: int) -> float:
    """Adam reads and writes parameters and moments and reads gradients; clipping reads and rescales them once more."""
    elements = sum(w.parameters(stage) for stage in w.stages[rank])
    over = w.data_size * w.cp if w.zero == 1 else (w.shards if w.zero == 3 else 1)
    moved = 2 * (w.master_bytes + w.state_bytes) + 4 * w.grad_bytes
    return elements / over * moved / (device.memory_bandwidth * device.memory_share)
