"""Every collective of a step as one rank calls it: kind, group, calls, bytes, whether it hides behind computation.

``tests/plan`` holds calls and bytes against what the real code does. Bytes are those of the whole: what an all-gather
returns, what a reduce-scatter takes, what an all-reduce or a message holds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from titanlite.plan.hardware import Device
from titanlite.plan.workload import Workload


@dataclass(frozen=True)
class Collective:
    """So many ``calls`` of a kind in a group, ``bytes`` in all of them together.

    Attributes:
        dimension: the mesh dimensions of the group: "fsdp", "dp_replicate", "tp", "cp", "pp".
        size: ranks of the group.
        purpose: what travels.
        overlaps: whether computation goes on meanwhile.
    """

    kind: str
    dimension: str
    size: int
    purpose: str
    calls: float
    bytes: float
    overlaps: bool

    def as_dict(self, device: Device, w: Workload) -> dict[str, Any]:
        """For ``--json``: also the link and the seconds."""
        link = "network" if nodes_of(self, device, w) > 1 else "nvlink"
        return asdict(self) | {"link": link, "seconds": seconds(self, device, w)}


def collectives(w: Workload, rank: int = 0) -> list[Collective]:
    """The collectives of a step on a rank of pipeline rank ``rank``, those of the bookkeeping left out."""
    found = [*_fsdp(w, rank), *_zero(w, rank), *_tensor(w, rank), *_context(w, rank), *_pipeline(w, rank)]
    return [c for c in found if c.calls and c.size > 1]


def _groups(w: Workload, rank: int) -> list[tuple[float, float, str]]:
    """FSDP's groups of parameters on a pipeline rank: elements, those of them that tp replicates, and the kind."""
    groups = []
    for stage in w.stages[rank]:
        tied = w.sizes.tie_embeddings
        if stage.embedding and not tied:
            groups.append((w.table + w.learned_positions * w.sizes.dim, 0.0, "embedding"))
        groups += [(w.block, w.block_norms, "block")] * stage.blocks
        if stage.output and not tied:
            groups.append((w.table + w.sizes.dim, w.sizes.dim, "head"))
        if tied and (stage.embedding or stage.output):
            groups.append((w.table + w.sizes.dim * stage.output, w.sizes.dim, "root"))
    return groups


def _fsdp(w: Workload, rank: int) -> list[Collective]:
    """FSDP2 (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html), as ``parallel.data`` wraps.

    A forward and a backward pass gather each group once; the head stays between the two unless ``always``; with
    pipelines, or ``never``, everything stays. Gradients are reduced with the last micro-batch only. HSDP reduces the
    shards once more over the replicas.
    """
    if w.zero != 3 or not w.wrapped:
        return []
    groups = _groups(w, rank)
    elements = sum(size for size, _, _ in groups)
    calls, gathered = 0.0, 0.0
    for size, _, kind in groups:
        if w.pp > 1 and w.gathered_after_forward:
            times = 1
        elif w.gathered_after_forward or (kind in ("head", "root") and not (w.always and kind == "head")):
            times = w.passes
        else:
            times = 2 * w.passes
        calls += times
        width = 1 if w.float8_gather and kind == "block" else w.gather_bytes
        gathered += times * size * width
    found = [
        Collective("all_gather", "fsdp", w.shards, "weights", calls, gathered, True),
        Collective("reduce_scatter", "fsdp", w.shards, "gradients", len(groups), elements * w.reduce_bytes, True),
    ]
    share = elements / w.shards * w.reduce_bytes
    found.append(Collective("all_reduce", "dp_replicate", w.dp_replicate, "gradients", len(groups), share, True))
    return found


def _zero(w: Workload, rank: int) -> list[Collective]:
    """Plain data parallelism (one all-reduce of the gradients) and ZeRO-1 (https://arxiv.org/abs/1910.02054).

    Only stacks other than titanlite. Buckets of 25 MB as DDP's, or one call a parameter.
    """
    if w.zero == 3:
        return []
    elements = sum(w.parameters(stage) for stage in w.stages[rank])
    tensors = sum(9 * stage.blocks + 3 for stage in w.stages[rank])
    buckets = max(1.0, elements * w.reduce_bytes / 25e6)
    calls = tensors if w.per_parameter else min(tensors, buckets)
    size = w.data_size * w.cp
    if w.zero == 0:
        return [Collective("all_reduce", "fsdp", size, "gradients", calls, elements * w.reduce_bytes, True)]
    return [
        Collective("reduce_scatter", "fsdp", size, "gradients", calls, elements * w.reduce_bytes, not w.per_parameter),
        Collective("all_gather", "fsdp", size, "weights", calls, elements * w.gather_bytes, not w.per_parameter),
    ]


def _tensor(w: Workload, rank: int) -> list[Collective]:
    """Tensor with sequence parallelism (https://arxiv.org/abs/2205.05198, section 4.2).

    A block gathers the hidden states before each pair of matrices and scatters them after it, and so its backward. Full
    recomputation does the forward ones again, a policy by operation only the gathers. Without sequence parallelism
    each pair is an all-reduce, which moves as much.
    """
    if w.tp == 1:
        return []
    hidden = w.tokens * w.sizes.dim * w.compute_bytes
    gathers = scatters = 0.0
    for stage in w.stages[rank]:
        again = w.recomputed_blocks(stage)
        gathers += 4 * stage.blocks + 2 * again + (2 * stage.blocks if w.recompute == "op" else 0)
        scatters += 4 * stage.blocks + 2 * again
        gathers += stage.embedding + stage.output
        scatters += stage.embedding + stage.output
    gathers, scatters = gathers * w.passes, scatters * w.passes
    found = []
    if w.sequence_parallel:
        found += [
            Collective("all_gather", "tp", w.tp, "hidden states", gathers, gathers * hidden, w.async_tp),
            Collective("reduce_scatter", "tp", w.tp, "hidden states", scatters, scatters * hidden, w.async_tp),
        ]
    else:
        found.append(Collective("all_reduce", "tp", w.tp, "hidden states", scatters, scatters * hidden, False))
    ends = sum(stage.output for stage in w.stages[rank])
    if ends and w.vocabulary_parallel:
        calls = 2 * w.passes * w.loss_chunks
        found.append(Collective("all_reduce", "tp", w.tp, "loss", calls, w.passes * 3 * w.tokens * 4, False))
    elif ends:
        logits = w.passes * w.tokens * w.sizes.vocab_size * w.compute_bytes
        found.append(Collective("all_gather", "tp", w.tp, "logits", w.passes, logits, False))
    if w.sequence_parallel and w.zero == 3:
        norms = sum(2 * stage.blocks + stage.output for stage in w.stages[rank])
        if w.wrapped:
            width = w.reduce_bytes if w.passes > 1 else w.gather_bytes
            found.append(Collective("all_reduce", "tp", w.tp, "norms", norms, norms * w.sizes.dim * width, False))
        else:
            found.append(Collective("all_reduce", "tp", w.tp, "norms", 1, norms * w.sizes.dim * w.grad_bytes, False))
    return found


def _context(w: Workload, rank: int) -> list[Collective]:
    """Keys and values of the whole sequence, as ``parallel.ring``: gathered (https://arxiv.org/abs/2407.21783,
    section 3.3.2) or passed on from rank to rank (https://arxiv.org/abs/2310.01889); fp32 gradients go home."""
    if w.cp == 1:
        return []
    s = w.sizes
    blocks = sum(stage.blocks for stage in w.stages[rank])
    forwards = blocks + (blocks if w.recompute == "op" else sum(w.recomputed_blocks(stage) for stage in w.stages[rank]))
    elements = 2 * w.tokens * s.n_kv_heads / w.tp * s.head_dim
    if w.ring:
        hops = w.cp - 1
        calls = w.passes * hops * (forwards + 2 * blocks)
        size = w.passes * hops * elements * (w.compute_bytes * (forwards + blocks) + 4 * blocks)
        return [Collective(kind, "cp", w.cp, "keys and values", calls, size, True) for kind in ("send", "recv")]
    whole = elements * w.cp
    gathers = w.passes * (forwards + blocks)
    return [
        Collective("all_gather", "cp", w.cp, "keys and values", gathers, gathers * whole * w.compute_bytes, False),
        Collective(
            "reduce_scatter", "cp", w.cp, "keys and values", w.passes * blocks, w.passes * blocks * whole * 4, False
        ),
    ]


def _pipeline(w: Workload, rank: int) -> list[Collective]:
    """Hidden states forwards and their gradients backwards over every link that the rank's stages are at."""
    if w.pp == 1:
        return []
    owner = {number: place for place, numbers in _stage_places(w).items() for number in numbers}
    count = len(owner)
    links = 0
    for number in _stage_places(w)[rank]:
        links += number + 1 < count and owner[number + 1] != rank
        links += number > 0 and owner[number - 1] != rank
    message = w.tokens * w.sizes.dim * w.compute_bytes / (w.tp if w.sequence_parallel else 1)
    calls = links * w.passes
    return [Collective(kind, "pp", w.pp, "hidden states", calls, calls * message, True) for kind in ("send", "recv")]


def _stage_places(w: Workload) -> dict[int, list[int]]:
    """By pipeline rank, the numbers of its stages."""
    v_shaped = w.schedule in ("ZBVZeroBubble", "DualPipeV")
    return {
        rank: [rank, 2 * w.pp - 1 - rank] if v_shaped else [rank + i * w.pp for i in range(len(w.stages[rank]))]
        for rank in range(w.pp)
    }


def nodes_of(c: Collective, device: Device, w: Workload) -> int:
    """Over how many nodes a group lies; ranks are numbered pp, dp_replicate, dp_shard, cp, tp from outside in."""
    inner = {"tp": 1, "cp": w.tp, "fsdp": w.tp, "dp_replicate": w.tp * w.cp * w.dp_shard}
    inner["pp"] = inner["dp_replicate"] * w.dp_replicate
    stride = inner[c.dimension]
    here = max(1, min(c.size, device.per_node // stride))
    return -(-c.size // here)


def seconds(c: Collective, device: Device, w: Workload) -> float:
    """Time of all calls: a ring (https://docs.nvidia.com/deeplearning/nccl; alpha-beta model).

    ``(n - 1) / n`` of the bytes pass every link, twice for an all-reduce; each of the ``n - 1`` hops has its latency.
    A group with g ranks in a node has g network adapters to itself.
    """
    nodes = nodes_of(c, device, w)
    link = device.link_bandwidth * device.link_share
    if c.kind in ("send", "recv"):
        if c.kind == "recv":
            return 0.0  # at the same time as the send
        over = device.network_bandwidth * device.network_share if nodes > 1 else link
        return c.bytes / over + c.calls * (device.network_latency if nodes > 1 else device.link_latency)
    here = c.size / nodes
    rate = min(link, here * device.network_bandwidth * device.network_share) if nodes > 1 else link
    times = 2 if c.kind == "all_reduce" else 1
    hops = (nodes - 1) * device.network_latency + (c.size - nodes) / nodes * device.link_latency
    if c.kind == "all_reduce":
        # A tree between the nodes: https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4
        hops = 2 * max(1, (nodes - 1).bit_length()) * device.network_latency * (nodes > 1) + device.link_latency * here
    return times * (c.size - 1) / c.size * c.bytes / rate + c.calls * (2 * device.link_latency + hops)


def one_call(c: Collective) -> Collective:
    """A single call of ``c``."""
    return replace(c, calls=1, bytes=c.bytes / c.calls)
