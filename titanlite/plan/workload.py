"""What is run, as numbers: the model, the layout, the batch and the precision. Everything else in the plan reads this.

A ``Workload`` describes titanlite's own runs (``from_config``) and, with other numbers, published runs of other stacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlite.models.sizes import DecoderSizes, sizes_of
from titanlite.parallel import schedule

if TYPE_CHECKING:
    from titanlite.config import Config

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHUNK_BYTES = 64 * 2**20
"""``titanlite.models.loss.CHUNK_BYTES``, without importing torch."""


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its number of blocks, and which ends of the model it has."""

    blocks: int
    embedding: bool
    output: bool
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Workload:
    """One training step. ``*_bytes`` are of one element.

    Attributes:
        micro_rows: rows of a micro-batch on one data-parallel rank.
        micros: micro-batches of one accumulation round; without a pipeline, of the step.
        rounds: accumulation rounds, each a run of the pipeline's schedule.
        stages: by pipeline rank, the stages it runs.
        in_flight: by pipeline rank, micro-batches (of one of its stages) whose activations are alive at the worst.
        bubble: share of the time that pipeline ranks wait.
        zero: 3 shards parameters, gradients and optimizer state (FSDP); 1 the optimizer state; 0 nothing.
        per_parameter: other stacks: gradients are reduced one by one, after the backward pass.
        overlap_tp: share of the tensor-parallel communication that the stack hides.
        attention_speed: of the attention kernel, relative to flash attention 2.
        recompute: "none", "full", "op", or "k" for every ``recompute_every``-th block.
        alternate: "op" recomputes every other matmul, as torchtitan's does, and not only those within a fifth of the FLOPs.
    """

    sizes: DecoderSizes
    seq_len: int
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    micro_rows: int = 1
    micros: int = 1
    rounds: int = 1
    stages: tuple[tuple[Stage, ...], ...] = ()
    in_flight: tuple[int, ...] = (1,)
    bubble: float = 0.0
    schedule: str = ""
    zero: int = 3
    wrapped: bool = True
    gathered_after_forward: bool = False
    always: bool = False
    master_bytes: int = 4
    gather_bytes: int = 2
    grad_bytes: int = 4
    reduce_bytes: int = 4
    state_bytes: float = 8
    extra_bytes: float = 0
    compute_bytes: int = 2
    gated: bool = True
    learned_positions: int = 0
    recompute: str = "none"
    recompute_every: int = 1
    alternate: bool = False
    compiled: bool = False
    compiled_loss: bool = False
    sequence_parallel: bool = True
    async_tp: bool = False
    vocabulary_parallel: bool = True
    float8: bool = False
    float8_gather: bool = False
    loss_chunks: int = 1
    ring: bool = False
    offload: bool = False
    early_step: bool = False
    on_cpu: bool = False
    per_parameter: bool = False
    overlap_tp: float = 0.0
    attention_speed: float = 1.0

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_size(self) -> int:
        """Ranks that rows are dealt to."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that FSDP shards over."""
        return self.dp_shard * self.cp

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on this rank's part of the sequence, before tensor parallelism."""
        return self.micro_rows * self.seq_len / self.cp

    @property
    def passes(self) -> int:
        """Forward passes of a step through each stage."""
        return self.micros * self.rounds

    @property
    def global_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.passes * self.micro_rows * self.seq_len * self.data_size

    @property
    def block_matrices(self) -> int:
        """Elements of a block's matrices, unsharded."""
        s = self.sizes
        attention = 2 * s.dim * s.head_dim * (s.n_heads + s.n_kv_heads)
        return attention + (3 if self.gated else 2) * s.dim * s.ffn_dim

    @property
    def block_norms(self) -> int:
        """Elements of a block's norms, which tensor parallelism replicates."""
        return 2 * self.sizes.dim

    @property
    def block(self) -> float:
        """Elements of a block on one tensor-parallel rank."""
        return self.block_matrices / self.tp + self.block_norms

    @property
    def table(self) -> float:
        """Elements of the embedding, or of the head, on one tensor-parallel rank."""
        return self.sizes.vocab_size * self.sizes.dim / self.tp

    def parameters(self, stage: Stage) -> float:
        """Elements of a stage on one tensor-parallel rank, before FSDP shards them."""
        tables = int(stage.embedding) + int(stage.output)
        if stage.embedding and stage.output and self.sizes.tie_embeddings:
            tables = 1
        positions = self.learned_positions * self.sizes.dim * stage.embedding
        return stage.blocks * self.block + tables * self.table + self.sizes.dim * stage.output + positions

    @property
    def flops_per_token(self) -> float:
        """Operations of forward and backward for a token as ``titanlite.monitor.flops`` counts them for the MFU."""
        s = self.sizes
        matmuls = s.n_layers * (self.block_matrices + self.block_norms) + s.vocab_size * s.dim + s.dim
        return 6.0 * matmuls + 6.0 * s.n_layers * s.n_heads * s.head_dim * self.seq_len

    def recomputed_blocks(self, stage: Stage) -> int:
        """How many blocks of a stage run their forward pass twice."""
        if self.recompute in ("none", "op"):
            return 0
        if not stage.numbers:
            return -(-stage.blocks // self.recompute_every)
        return sum(number % self.recompute_every == 0 for number in stage.numbers)


def in_flight_of(order: dict[int, list[schedule.Action]]) -> tuple[int, ...]:
    """By rank, the most micro-batches (over all its stages) that are forwarded and not yet backwarded.

    Where the backward is split, the activations go with its second half.
    """
    most = []
    for rank in sorted(order):
        alive = peak = 0
        split = any(action.kind == "W" for action in order[rank])
        for action in order[rank]:
            alive += action.kind == "F"
            peak = max(peak, alive)
            alive -= action.kind == "B" or (split and action.kind == "W")
        most.append(peak)
    return tuple(most)


def _pipeline(config: Config, count: int) -> tuple[tuple[int, ...], float]:
    """Micro-batches in flight by rank, over all of a rank's stages, and the bubble of one round.

    1F1B and GPipe: https://arxiv.org/abs/2104.04473, section 2. Interleaved: the same, section 2.2, with a warm-up of
    ``(v - 1) * p + 2 * (p - 1 - rank)`` forwards; v stages a rank divide the bubble by v. The V-shaped zero-bubble
    schedules: https://arxiv.org/abs/2401.10241 and https://arxiv.org/abs/2405.15362, section 3: as much memory as 1F1B
    and next to no waiting.
    """
    keys = config.parallelism
    name, ranks, micros = schedule.schedule_name(keys), keys.pipeline_parallel_degree, schedule.micro_batches(config)
    each = count // ranks
    if name == "csv":
        order = schedule.read_csv(keys.pipeline_parallel_schedule_csv)
        return in_flight_of(order), schedule.bubble(order)
    if name in schedule.ONE_STAGE:
        flight = tuple(micros if name == "GPipe" else min(micros, ranks - rank) for rank in range(ranks))
        return flight, (ranks - 1) / (micros + ranks - 1)
    if name in schedule.V_SHAPED:
        return (min(2 * micros, 2 * ranks),) * ranks, 0.5 * (ranks - 1) / (3 * micros + ranks - 1)
    if name == "LoopedBFS":
        flight = (each * micros,) * ranks
    else:
        size = micros // max(1, micros // ranks)
        flight = tuple(min(each * micros, (each - 1) * size + 2 * (ranks - 1 - rank) + 1) for rank in range(ranks))
    # Splitting the backward fills about another third of the bubble.
    waits = (ranks - 1) / each * (2 / 3 if name == "InterleavedZeroBubble" else 1)
    return flight, waits / (micros + waits)


def stage_of(modules: list[str]) -> Stage:
    """A stage from the names of its modules."""
    numbers = tuple(int(name.split(".")[1]) for name in modules if name.startswith("layers."))
    return Stage(len(numbers), "tok_embeddings" in modules, "output" in modules, numbers)


_cuts: dict[tuple[Any, ...], tuple[tuple[Stage, ...], ...]] = {}


def _stages(config: Config, n_layers: int) -> tuple[tuple[Stage, ...], ...]:
    """By pipeline rank, its stages; remembered, as a search asks for the same ones thousands of times."""
    p = config.parallelism
    key = (
        n_layers,
        p.pipeline_parallel_degree,
        p.pipeline_parallel_schedule,
        p.pipeline_parallel_schedule_csv,
        p.pipeline_parallel_layers_per_stage,
        p.pipeline_parallel_first_stage_less_layers,
        p.pipeline_parallel_last_stage_less_layers,
        str(p.module_fqns_per_model_part),
    )
    if key not in _cuts:
        modules = schedule.stage_modules(config, n_layers)
        _cuts[key] = tuple(
            tuple(stage_of(modules[i]) for i in schedule.stages_of(rank, len(modules), p))
            for rank in range(p.pipeline_parallel_degree)
        )
    return _cuts[key]


def from_config(config: Config, world_size: int, on_cpu: bool = False) -> Workload:
    """The workload of ``config`` on ``world_size`` devices.

    Raises:
        UserError: the pipeline cannot be cut as the config asks.
    """
    sizes, p, t = sizes_of(config.model), config.parallelism, config.training
    pp, rep, cp, tp = (
        p.pipeline_parallel_degree,
        p.data_parallel_replicate_degree,
        p.context_parallel_degree,
        p.tensor_parallel_degree,
    )
    shard = p.data_parallel_shard_degree
    shard = world_size // (pp * rep * cp * tp) if shard == -1 else shard
    data_size = rep * shard
    rows = t.global_batch_size // data_size if t.global_batch_size > 0 else t.local_batch_size
    micro = min(t.local_batch_size, rows)
    everything = Stage(sizes.n_layers, True, True, tuple(range(sizes.n_layers)))
    stages: tuple[tuple[Stage, ...], ...] = ((everything,),)
    flight: tuple[int, ...] = (1,)
    bubble, micros, rounds, micro_rows = 0.0, -(-rows // micro), 1, micro
    if pp > 1:
        stages = _stages(config, sizes.n_layers)
        flight, bubble = _pipeline(config, sum(len(mine) for mine in stages))
        micro_rows = p.pipeline_parallel_microbatch_size
        micros, rounds = micro // micro_rows, -(-rows // micro)
    master, compute = BYTES[t.dtype], BYTES[t.mixed_precision_param]
    # As titanlite.parallel.data wraps.
    wrapped = shard * cp * rep > 1 or t.mixed_precision_param != t.dtype or t.enable_cpu_offload
    ac, option = config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option
    recompute = {"none": "none", "full": "full", "memory_budget": "none"}.get(ac, "op" if option == "op" else "k")
    float8 = config.quantize.linear.float8
    uses_float8 = "float8" in config.model.converters
    logits = micro_rows * t.seq_len / cp * sizes.vocab_size / tp * 4
    chunks = max(1, -(-int(logits) // CHUNK_BYTES)) if t.loss_chunks == "auto" else int(t.loss_chunks)
    state = {"Muon": 4.0}.get(config.optimizer.name, 8.0 if config.optimizer.state_dtype == "float32" else 4.0)
    if config.optimizer.state_dtype == "float32" and config.optimizer.name != "Muon":
        state = 2.0 * master
    reshard = p.fsdp_reshard_after_forward
    kept = reshard == "never" or (reshard == "default" and pp > 1)
    return Workload(
        sizes=sizes,
        seq_len=t.seq_len,
        pp=pp,
        dp_replicate=rep,
        dp_shard=shard,
        cp=cp,
        tp=tp,
        micro_rows=micro_rows,
        micros=micros,
        rounds=rounds,
        stages=stages,
        in_flight=flight,
        bubble=bubble,
        schedule=schedule.schedule_name(p) if pp > 1 else "",
        wrapped=wrapped,
        gathered_after_forward=kept,
        always=reshard == "always",
        master_bytes=master,
        gather_bytes=compute,
        grad_bytes=master,
        reduce_bytes=BYTES[t.mixed_precision_reduce],
        state_bytes=state,
        compute_bytes=compute,
        recompute=recompute,
        recompute_every=1 if recompute in ("full", "op", "none") else int(option),
        compiled=config.compile.enable and "model" in config.compile.components and not on_cpu,
        compiled_loss=config.compile.enable and "loss" in config.compile.components and not on_cpu,
        async_tp=p.enable_async_tensor_parallel,
        vocabulary_parallel=not p.disable_loss_parallel,
        float8=uses_float8,
        float8_gather=uses_float8 and float8.enable_fsdp_float8_all_gather,
        loss_chunks=chunks,
        ring=p.context_parallel_rotate_method == "alltoall",
        offload=t.enable_cpu_offload,
        early_step=config.optimizer.early_step_in_backward,
        on_cpu=on_cpu,
    )
