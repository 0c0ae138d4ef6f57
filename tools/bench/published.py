"""Published runs as workloads: the architecture and the rules of each stack, from its own source."""

from __future__ import annotations

import re

from titanlite.models.sizes import DecoderSizes
from titanlite.plan.hardware import Device, device
from titanlite.plan.workload import Stage, Workload

# dim, blocks, heads: llm-foundry's scripts/train/yamls/pretrain/mpt-*.yaml
MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
# dim, blocks, heads: the table's own columns
GPT = {
    "1.7B": (2048, 24, 16),
    "3.6B": (3072, 30, 32),
    "7.5B": (4096, 36, 32),
    "16B": (6144, 32, 48),
    "18B": (6144, 40, 48),
    "27B": (6656, 48, 52),
    "39B": (8192, 48, 64),
    "70B": (8192, 84, 64),
    "76B": (10240, 60, 80),
    "145B": (12288, 80, 96),
    "177B": (12288, 96, 96),
    "314B": (16384, 96, 128),
    "462B": (18432, 112, 144),
}
# blocks, dim, heads, ffn: nanotron's scripts/scaling_benchmarks.py
NANOTRON = {
    "1.34B": (16, 2048, 32, 8192),
    "3.57B": (28, 3072, 32, 8192),
    "8.86B": (32, 4096, 32, 14336),
    "80.0B": (80, 8192, 64, 28672),
}
LLAMA = {
    "7B": DecoderSizes(4096, 32, 32, 8, 128, 14336, 128256),
    "8B": DecoderSizes(4096, 32, 32, 8, 128, 14336, 128256),
    "13B": DecoderSizes(5120, 40, 40, 8, 128, 17920, 128256),
    "70B": DecoderSizes(8192, 80, 64, 8, 128, 28672, 128256),
    "405B": DecoderSizes(16384, 126, 128, 8, 128, 53248, 128256),
}


def workload(row: dict[str, str]) -> tuple[Workload, Device]:
    """A row's workload and device."""
    for part, rules in (
        ("llm-foundry", _foundry),
        ("Megatron", _megatron),
        ("nanotron", _nanotron),
        ("torchtitan", _torchtitan),
        ("KempnerForge", _kempner),
    ):
        if part in row["source"]:
            return rules(row)
    raise SystemExit(f"no rules for runs of {row['source']}")


def measured(row: dict[str, str], w: Workload, on: Device) -> tuple[float, float | None]:
    """Tokens a second on each device, and GiB or None. Where only the MFU or TFLOP/s are told, by the stack's count.

    Megatron (training.py, num_floating_point_operations) and nanotron (llama.py, get_flops) count attention in full.
    """
    memory = float(row["mem_gib"]) if row["mem_gib"] else None
    if row["tps_per_gpu"]:
        return float(row["tps_per_gpu"]), memory
    s = w.sizes
    per_token = 6.0 * (s.n_layers * w.block_matrices + s.vocab_size * s.dim)
    per_token += 12.0 * s.n_layers * s.n_heads * s.head_dim * w.seq_len
    flops = float(row["tflops_per_gpu"]) * 1e12 if row["tflops_per_gpu"] else float(row["mfu"]) / 100 * on.peak_bf16
    return flops / per_token, memory


def _number(row: dict[str, str], name: str, default: int = 1) -> int:
    return int(float(row[name])) if row[name] else default


def _noted(row: dict[str, str], pattern: str, default: int) -> int:
    found = re.search(pattern, row["notes"])
    return int(found[1]) if found else default


def _stages(layers: int, pp: int) -> tuple[tuple[Stage, ...], ...]:
    """Even stages, the embedding first and the head last, one a rank."""
    share, more = divmod(layers, pp)
    return tuple((Stage(share + (rank < more), rank == 0, rank == pp - 1),) for rank in range(pp))


def _balanced(layers: int, pp: int, head: float) -> tuple[tuple[Stage, ...], ...]:
    """Stages of equal cost where the head costs as much as ``head`` blocks."""
    per_rank = (layers + head) / pp
    ends = [min(layers, round(per_rank * (rank + 1))) for rank in range(pp - 1)] + [layers]
    begins = [0, *ends[:-1]]
    return tuple(
        (Stage(end - begin, rank == 0, rank == pp - 1),)
        for rank, (begin, end) in enumerate(zip(begins, ends, strict=True))
    )


def _layout(row: dict[str, str], sizes: DecoderSizes, micros: int) -> dict:
    pp, micros = _number(row, "pp"), max(1, micros)
    return {
        "sizes": sizes,
        "seq_len": _number(row, "seq_len"),
        "dp_shard": _number(row, "dp"),
        "tp": _number(row, "tp"),
        "pp": pp,
        "cp": _number(row, "cp"),
        "micros": micros,
        "stages": _stages(sizes.n_layers, pp),
        "in_flight": tuple(min(micros, pp - rank) for rank in range(pp)),
        "bubble": (pp - 1) / (micros + pp - 1),
        "schedule": "1F1B" if pp > 1 else "",
    }


def _foundry(row: dict[str, str]) -> tuple[Workload, Device]:
    """MPT: ALiBi, plain feed-forward of four times the width, tied embeddings; FSDP1; PURE is bf16 throughout."""
    dim, blocks, heads = MPT[row["model"].split("-")[1].lower()]
    sizes = DecoderSizes(dim, blocks, heads, heads, dim // heads, 4 * dim, 50368, tie_embeddings=True)
    pure = "PURE" in row["precision"]
    keep = "SHARD_GRAD_OP" in row["notes"]
    width = 2 if pure else 4
    w = Workload(
        **_layout(row, sizes, _noted(row, r"grad_accum=(\d+)", 1)),
        micro_rows=_number(row, "local_batch"),
        gated=False,
        # Its Triton kernel is flash attention 1, half as fast: https://arxiv.org/abs/2307.08691, figure 4.
        attention_speed=0.5,
        gathered_after_forward=keep,
        master_bytes=width,
        grad_bytes=width,
        reduce_bytes=2,
        state_bytes=2 * width,
        recompute="full" if row["ac"] == "full" else "none",
    )
    network = 25e9
    return w, device(row["gpu"], network_bandwidth=network) if "a100" in row["gpu"] else device(row["gpu"])


def _megatron(row: dict[str, str]) -> tuple[Workload, Device]:
    """Megatron-Core: distributed optimizer, fused kernels, interleaved stages, tensor-parallel overlap."""
    dim, blocks, heads = GPT[row["model"].split("-")[1]]
    sizes = DecoderSizes(dim, blocks, heads, heads, dim // heads, 4 * dim, 131072, tie_embeddings=True)
    rows = int(row["global_batch_tokens"]) // int(row["seq_len"]) // _number(row, "dp")
    layout = _layout(row, sizes, rows)
    if layout["pp"] > 1:
        each = max(n for n in (1, 2, 4, 7, 6) if blocks % (n * layout["pp"]) == 0)
        layout["bubble"] = (layout["pp"] - 1) / each / (rows + (layout["pp"] - 1) / each)
    w = Workload(
        **layout,
        micro_rows=1,
        gated=False,
        compiled=True,
        compiled_loss=True,
        zero=1,
        gather_bytes=2,
        state_bytes=12,
        overlap_tp=0.5,
    )
    return w, device("h100")


def _nanotron(row: dict[str, str]) -> tuple[Workload, Device]:
    """nanotron: bf16 weights, fp32 gradients and master weights; ZeRO-1 a parameter at a time; tied below 4B."""
    blocks, dim, heads, ffn = NANOTRON[row["model"].split()[1]]
    sizes = DecoderSizes(dim, blocks, heads, heads, dim // heads, ffn, 131072, tie_embeddings=ffn < 10_000)
    zero = _noted(row, r"ZeRO-(\d)", 0)
    layout = _layout(row, sizes, _noted(row, r"GAS=(\d+)", 1))
    block = 4 * dim * dim + 3 * dim * ffn
    layout["stages"] = _balanced(blocks, layout["pp"], sizes.vocab_size * dim / block)
    w = Workload(
        **layout,
        micro_rows=_number(row, "local_batch"),
        zero=zero,
        master_bytes=4,
        gather_bytes=2,
        grad_bytes=4,
        state_bytes=12,
        per_parameter=zero == 1,
    )
    return w, device("h100")


def _torchtitan(row: dict[str, str]) -> tuple[Workload, Device]:
    """torchtitan: FSDP2 with fp32 parameters; selective checkpointing by operation, full for 70B; logits in one piece."""
    sizes = LLAMA[row["model"].split("-")[1]]
    asynchronous = "AsyncTP" in row["notes"]
    w = Workload(
        **_layout(row, sizes, 1),
        micro_rows=_number(row, "local_batch"),
        recompute={"selective": "op", "full": "full"}.get(row["ac"], "none"),
        alternate=True,
        compiled="compile" in row["notes"] or row["precision"] == "float8",
        float8=row["precision"] == "float8",
        float8_gather=row["precision"] == "float8",
        async_tp=asynchronous,
    )
    return w, device("h100_96gb")


def _kempner(row: dict[str, str]) -> tuple[Workload, Device]:
    """KempnerForge: everything bf16, FSDP2, full checkpointing; four H200 a node; tensor without sequence parallelism."""
    sizes = LLAMA[row["model"].split("-")[1].split("(")[0]]
    w = Workload(
        **_layout(row, sizes, _noted(row, r"grad_accum=(\d+)", 1)),
        micro_rows=_number(row, "local_batch"),
        master_bytes=2,
        grad_bytes=2,
        reduce_bytes=2,
        state_bytes=4,
        recompute="full" if row["ac"] == "full" else "none",
        compiled="compile=True" in row["notes"],
        compiled_loss="compile=True" in row["notes"],
        sequence_parallel=False,
        vocabulary_parallel=False,
    )
    return w, device("h200", per_node=4)
