"""Every table and key of the configuration, with type, default and meaning.

Table and key names are those of torchtitan's TOML files. A field's description is its ``--help`` text and its line in
``docs/config.md``. Keys that stand here only to be refused by name are listed in ``dialect.py``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def key(default: Any, doc: str) -> Any:
    """A key of a table: its default and its meaning."""
    return Field(default, description=doc)


def table(kind: type[BaseModel]) -> Any:
    """A table inside a table, all defaults unless given."""
    return Field({}, validate_default=True)


class Table(BaseModel):
    """A TOML table: unknown keys are errors, values are never converted, nothing changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class Job(Table):
    """The run: where it writes, what it is called, how long it may take."""

    config_file: str | None = key(None, "TOML file; run_train.sh passes CONFIG_FILE")
    dump_folder: str = key("./outputs", "folder that everything a run leaves is written to")
    run_id: str | None = key(None, "name of a folder under dump_folder for this run alone")
    description: str = key("default job", "what this run is, kept with it")
    print_config: bool = key(False, "print the resolved config at start")
    save_config_file: str | None = key(
        None, "also write the resolved config to this file, relative to the run's folder"
    )
    max_minutes: Annotated[float, Field(gt=0)] | None = key(
        None, "wall-clock budget: when it is used up the step is finished, a checkpoint published, exit code 0"
    )


class Profiling(Table):
    """Traces and memory snapshots on a schedule."""

    enable_profiling: bool = key(False, "write a trace of profiler_active steps every profile_freq steps")
    save_traces_folder: str = key("profile_traces", "folder of the traces under the run's folder")
    profile_freq: Positive = key(10, "steps from one trace to the next")
    profiler_active: Positive = key(1, "steps in a trace")
    profiler_warmup: NotNegative = key(3, "steps that the profiler warms up before")
    enable_memory_snapshot: bool = key(False, "write the CUDA allocator's history every profile_freq steps")
    save_memory_snapshot_folder: str = key("memory_snapshot", "folder of the snapshots under the run's folder")
    ranks: list[NotNegative] = key([], "ranks that write; empty: all")


class Metrics(Table):
    """What is logged, and how often."""

    log_freq: Positive = key(10, "steps from one logged line to the next; the first and last step are always logged")
    enable_tensorboard: bool = key(False, "write TensorBoard event files")
    disable_color_printing: bool = key(False, "plain text on a terminal too")
    save_tb_folder: str = key("tb", "folder of the event files under the run's folder")
    save_for_all_ranks: bool = key(False, "every rank writes event files, in a folder of its own")
    norms_freq: NotNegative = key(
        0, "steps from one record of gradient and weight norms by block to the next; 0: never"
    )


class RopeScaling(Table):
    """Llama 3.1's stretching of the rotary frequencies."""

    factor: Annotated[float, Field(gt=0)] = key(8.0, "by how much slow frequencies are stretched")
    low_freq_factor: Annotated[float, Field(gt=0)] = key(
        1.0, "turns within the first context below which all is stretched"
    )
    high_freq_factor: Annotated[float, Field(gt=0)] = key(4.0, "turns above which nothing is stretched")
    original_max_position_embeddings: Positive = key(8192, "length of the first training's context")


class Model(Table):
    """The model: a family, a flavor of it, and what differs from the flavor."""

    name: Literal["llama3", "qwen3"] = key("llama3", "model family")
    flavor: str = key("debugmodel", "published size of the family; see titanlite/models/flavors.py")
    hf_assets_path: str = key(
        "bytes", "folder with tokenizer.json or tokenizer.model, or `bytes` for the embedded byte tokenizer"
    )
    converters: list[Literal["float8"]] = key([], "changes to the model before it is parallelised: float8")
    print_after_conversion: bool = key(False, "print the model after the converters")
    dim: Positive | None = key(None, "width of the residual stream; default: the flavor's")
    n_layers: Positive | None = key(None, "number of blocks; default: the flavor's")
    n_heads: Positive | None = key(None, "query heads; default: the flavor's")
    n_kv_heads: Positive | None = key(None, "key and value heads; default: the flavor's")
    head_dim: Positive | None = key(None, "width of a head; default: the flavor's, or dim / n_heads where those change")
    ffn_dim: Positive | None = key(None, "inner width of the feed-forward; default: the flavor's, scaled with dim")
    vocab_size: Positive | None = key(None, "rows of the embedding; default: the flavor's")
    norm_eps: Annotated[float, Field(gt=0)] | None = key(None, "epsilon of RMSNorm; default: the flavor's")
    rope_theta: Annotated[float, Field(gt=0)] | None = key(
        None, "base of the rotary frequencies; default: the flavor's"
    )
    rope_scaling: RopeScaling | None = key(None, "Llama 3.1 frequency scaling; default: the flavor's")
    tie_embeddings: bool | None = key(None, "output head shares the embedding's weight; default: the flavor's")
    init_std: Annotated[float, Field(gt=0)] | None = key(None, "standard deviation of the blocks' initial weights")


class Optimizer(Table):
    """The optimizer."""

    name: Literal["AdamW", "Adam", "Muon"] = key(
        "AdamW", "AdamW, Adam, or Muon for the blocks' matrices with AdamW for the rest"
    )
    lr: Annotated[float, Field(ge=0)] = key(8e-4, "learning rate at the top of the schedule")
    beta1: Annotated[float, Field(ge=0, lt=1)] = key(0.9, "decay of the first moment; Muon's momentum")
    beta2: Annotated[float, Field(ge=0, lt=1)] = key(0.95, "decay of the second moment")
    eps: Annotated[float, Field(gt=0)] = key(1e-8, "added to the root of the second moment")
    weight_decay: Annotated[float, Field(ge=0)] = key(0.1, "decoupled weight decay of matrices; norms never decay")
    decay_embeddings: bool = key(True, "whether embedding and output head decay")
    implementation: Literal["for-loop", "foreach", "fused"] = key("fused", "which of torch's implementations")
    state_dtype: Literal["float32", "bfloat16"] = key("float32", "type of the moments; bfloat16 halves their memory")
    early_step_in_backward: bool = key(False, "step each parameter as soon as its gradient is there, and free it")


class LRScheduler(Table):
    """The learning rate over the steps: linear warm-up, stable, decay."""

    warmup_steps: NotNegative = key(200, "steps until the full learning rate")
    total_steps: Positive | None = key(None, "length of the schedule; default: training.steps")
    decay_ratio: Share | None = key(None, "share of the schedule that decays; default: all after the warm-up")
    decay_type: Literal["linear", "sqrt", "cosine"] = key("linear", "shape of the decay")
    min_lr_factor: Share = key(0.0, "share of the learning rate that is left at the end")


class Dataloader(Table):
    """Keys of torch's DataLoader, for compatibility; the loader prefetches in threads by data.prefetch."""

    num_workers: NotNegative = key(0, "accepted and ignored: the loader uses threads")
    persistent_workers: bool = key(False, "accepted and ignored")
    pin_memory: bool = key(False, "accepted and ignored: batches for a GPU are always pinned")
    prefetch_factor: Positive | None = key(None, "accepted and ignored: see data.prefetch")


class Training(Table):
    """Batches, steps, precision of the weights, and what happens when a step goes wrong."""

    dataset: Literal["embedded", "text", "jsonl", "parquet", "tokens", "hf", "c4", "c4_test", "c4_validation"] = key(
        "embedded", "kind of the training data; `embedded` is text that ships with Python"
    )
    dataset_path: str | None = key(
        None, "file, folder or glob of the training data; for `hf` a path or a dataset's name"
    )
    local_batch_size: Positive = key(8, "rows of a micro-batch on one rank, at most")
    global_batch_size: int = key(-1, "rows of a step over all ranks; -1: one micro-batch a data-parallel rank")
    seq_len: Positive = key(2048, "tokens in a row")
    max_norm: Annotated[float, Field(ge=0)] = key(1.0, "global gradient norm that gradients are clipped to; 0: never")
    steps: Positive = key(10_000, "optimizer steps of the whole run, those before a resume included")
    enable_cpu_offload: bool = key(False, "keep parameters, gradients and optimizer state in CPU memory")
    dtype: Literal["float32", "bfloat16"] = key("float32", "type of the parameters and their optimizer state")
    mixed_precision_param: Literal["float32", "bfloat16", "float16"] = key(
        "bfloat16", "type of the weights in forward and backward; float16 brings a dynamic loss scale"
    )
    mixed_precision_reduce: Literal["float32", "bfloat16"] = key("float32", "type that gradients are reduced in")
    mixed_precision_output: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "type that FSDP casts a module's output to"
    )
    cast_forward_inputs: bool = key(True, "cast a module's floating-point inputs to mixed_precision_param")
    gc_freq: Positive = key(50, "steps from one garbage collection, on all ranks at once, to the next")
    gc_debug: bool = key(False, "collect all generations each time and log what was found")
    pack_documents: bool = key(True, "fill rows with several documents; otherwise pad each document's last row")
    document_mask: bool = key(False, "keep attention inside a document and restart its positions")
    loss_chunks: Positive | Literal["auto"] = key("auto", "pieces of the batch whose logits exist one at a time")
    on_nonfinite: Literal["stop", "skip", "rollback"] = key("stop", "what a non-finite loss or gradient does")
    max_skips: NotNegative = key(10, "how many skips or rollbacks in all before the run stops")
    spike_threshold: Annotated[float, Field(gt=1)] | None = key(
        None, "a loss above this many times its running mean counts as non-finite"
    )
    dataloader: Dataloader = table(Dataloader)


class Source(Table):
    """One source of a mixture."""

    name: str = key(..., "what it is called in the logs")
    dataset: Literal["embedded", "text", "jsonl", "parquet", "tokens", "hf", "c4", "c4_test"] = key(
        ..., "kind of the data"
    )
    path: str | None = key(None, "file, folder or glob")
    weight: Annotated[float, Field(gt=0)] = key(1.0, "share of the tokens, relative to the other sources")
    text_key: str = key("text", "field that holds the text")


class Data(Table):
    """How documents become rows."""

    sources: list[Source] = key([], "a weighted mixture, instead of training.dataset")
    shuffle: bool = key(True, "a new order of the documents each epoch")
    shuffle_buffer: Positive = key(1000, "neighbours that Parquet, which is read in order, is shuffled within")
    packing: Literal["greedy", "best_fit"] = key("greedy", "greedy drops nothing; best_fit cuts fewer documents")
    on_bad_record: Literal["stop", "skip"] = key("stop", "what a record that cannot be read does")
    on_end: Literal["loop", "stop"] = key("loop", "whether the end of the data starts the next epoch or ends the run")
    prefetch: NotNegative = key(2, "batches made ahead of the step that takes them")
    allow_change: bool = key(False, "resume although corpus, tokenizer, weights or seed changed")


class Parallelism(Table):
    """Degrees of each dimension; their product is the number of processes."""

    data_parallel_replicate_degree: Positive = key(
        1, "copies of the sharded model (HSDP); with a shard degree of 1, DDP"
    )
    data_parallel_shard_degree: int = key(-1, "FSDP shards; -1: the ranks that the other degrees leave")
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | Positive = key(
        "default",
        "free gathered weights after forward; an integer reshards to that many ranks; default: not with pipelines",
    )
    tensor_parallel_degree: Positive = key(1, "pieces of each matrix, with sequence parallelism")
    disable_loss_parallel: bool = key(
        False, "gather the logits instead of computing the loss on pieces of the vocabulary"
    )
    enable_async_tensor_parallel: bool = key(False, "overlap tensor-parallel communication; needs compile and a GPU")
    pipeline_parallel_degree: Positive = key(1, "pipeline ranks")
    module_fqns_per_model_part: list[list[str]] | None = key(None, "modules of each stage, by name")
    pipeline_parallel_first_stage_less_layers: NotNegative = key(1, "blocks that the embedding counts as")
    pipeline_parallel_last_stage_less_layers: NotNegative = key(1, "blocks that the output head counts as")
    pipeline_parallel_layers_per_stage: Positive | None = key(
        None, "blocks of a stage; default: one or two stages a rank"
    )
    pipeline_parallel_schedule: str = key(
        "1F1B", "1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV"
    )
    pipeline_parallel_schedule_csv: str | None = key("", "file with a schedule of one's own")
    pipeline_parallel_microbatch_size: Positive = key(1, "rows of a pipeline micro-batch")
    context_parallel_degree: Positive = key(1, "pieces of each sequence")
    context_parallel_load_balancer: Literal["headtail"] | None = key(
        "headtail",
        "give each rank an early and a late piece, so that causal attention is even; none: consecutive pieces",
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = key("allgather", "how keys and values travel")


class Checkpoint(Table):
    """When state is saved, how, and what a run starts from."""

    enable: bool = key(False, "save and resume")
    folder: str = key("checkpoint", "folder of the checkpoints under the run's folder")
    interval: Positive = key(500, "steps from one checkpoint to the next")
    time_interval_minutes: Annotated[float, Field(gt=0)] | None = key(None, "also save when this much time has passed")
    initial_load_path: str | None = key(None, "checkpoint to start from where the run's own folder has none")
    initial_load_model_only: bool = key(True, "take only the weights from initial_load_path")
    initial_load_in_hf: bool = key(False, "initial_load_path is a folder of Hugging Face safetensors")
    last_save_model_only: bool = key(False, "the last checkpoint holds the weights alone, and cannot be resumed from")
    last_save_in_hf: bool = key(False, "write the last weights as Hugging Face safetensors too")
    export_dtype: Literal["float16", "bfloat16", "float32"] = key("float32", "type of the weights in a model-only save")
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key(
        "disabled", "write in the background; training waits for the copy only"
    )
    keep_latest_k: NotNegative = key(10, "how many checkpoints are kept; 0: all")
    keep_every: Positive | None = key(None, "also keep each checkpoint whose step this divides")
    load_step: int = key(-1, "step to load; -1: the newest intact one")
    exclude_from_loading: list[str] = key([], "what is not loaded: optimizer, lr_scheduler, dataloader, train_state")
    enable_first_step_checkpoint: bool = key(
        False, "save after the first step too, so that a wrong setting shows early"
    )
    create_seed_checkpoint: bool = key(False, "save the initial weights as step 0 and end")
    load_only: bool = key(False, "load, and never save")
    verify: Literal["size", "checksum"] = key("checksum", "what is compared before a checkpoint is loaded")
    on_save_error: Literal["auto", "warn", "stop"] = key(
        "auto", "what a failed save does; auto: stop where the save is synchronous, warn where it is not"
    )


class ActivationCheckpoint(Table):
    """What is recomputed in the backward pass instead of kept."""

    mode: Literal["selective", "full", "memory_budget", "none"] = key("selective", "which activations are recomputed")
    selective_ac_option: str = key("2", "`op`: cheap operations and every other matmul; n: every n-th block")
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = key(
        ["moe.router.gate"], "linear layers whose matmuls are always recomputed"
    )
    early_stop: bool = key(False, "stop recomputing once the last needed tensor is there")
    memory_budget: Share = key(0.5, "share of the activations to keep in mode memory_budget; needs compile")
    visualize_memory_budget_pareto: bool = key(False, "write the budget's trade-off as a picture")
    preserve_rng_state: bool = key(True, "recompute with the random state of the forward pass")
    determinism_check: Literal["default", "none"] = key(
        "default", "how recomputed tensors are compared with the first: default or none"
    )
    debug: bool = key(False, "tell which operations were recomputed where the two disagree")


class Compile(Table):
    """torch.compile, block by block."""

    enable: bool = key(False, "compile the components")
    components: list[Literal["model", "loss"]] = key(["model", "loss"], "what is compiled")
    backend: str = key("inductor", "torch.compile's backend")


class Float8Linear(Table):
    """float8 training of linear layers through torchao."""

    enable_fsdp_float8_all_gather: bool = key(False, "gather weights as float8; tensorwise only")
    precompute_float8_dynamic_scale_for_fsdp: bool = key(
        False, "one all-reduce for all scales after the optimizer step"
    )
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = key(None, "granularity of the scales")
    filter_fqns: list[str] = key([], "linear layers left alone, by a part of their name")
    emulate: bool = key(False, "compute in higher precision with float8's rounding; runs anywhere")


class Linear(Table):
    """Quantised linear layers."""

    float8: Float8Linear = table(Float8Linear)


class Quantize(Table):
    """Quantised training."""

    linear: Linear = table(Linear)


class Comm(Table):
    """Time limits and traces of communication."""

    init_timeout_seconds: Positive = key(300, "limit of a collective until the first step is done")
    train_timeout_seconds: Positive = key(100, "limit of a collective, and of a step without progress, afterwards")
    trace_buf_size: NotNegative = key(20_000, "entries of NCCL's flight recorder")
    save_traces_folder: str = key("comm_traces", "folder of stacks and flight records under the run's folder")
    save_traces_file_prefix: str = key("rank_", "how their names begin")
    mode: Literal["default", "fake_backend", "local_tensor"] = key(
        "default", "fake_backend: dry run without communication"
    )


class MemoryEstimation(Table):
    """A dry run that estimates memory."""

    enable: bool = key(False, "estimate the memory of this config on this many ranks, print it, and end")
    disable_fake_mode: bool = key(False, "run the estimate on real tensors")


class ValidationTable(Table):
    """Loss on held-out data."""

    enable: bool = key(False, "validate")
    dataset: Literal["embedded", "text", "jsonl", "parquet", "tokens", "hf", "c4", "c4_test", "c4_validation"] = key(
        "c4_validation", "kind of the validation data"
    )
    dataset_path: str | None = key(None, "file, folder or glob of the validation data")
    local_batch_size: Positive = key(8, "rows of a validation batch on one rank")
    seq_len: Positive = key(2048, "tokens in a validation row")
    freq: Positive = key(10, "training steps from one validation to the next")
    steps: int = key(-1, "global batches of a validation; -1: all the data once")
    dataloader: Dataloader = table(Dataloader)


class Debug(Table):
    """Seeds, determinism and drills."""

    seed: int | None = key(None, "seed of weights and data order; default: 0")
    deterministic: bool = key(False, "only deterministic algorithms")
    deterministic_warn_only: bool = key(False, "warn instead of stopping where there is none")
    faults: list[str] = key(
        [], "faults to inject: nan@step:rank, kill@step:rank, hang@step:rank, slow@step:rank:seconds"
    )


class Config(Table):
    """A whole run."""

    job: Job = table(Job)
    profiling: Profiling = table(Profiling)
    metrics: Metrics = table(Metrics)
    model: Model = table(Model)
    optimizer: Optimizer = table(Optimizer)
    lr_scheduler: LRScheduler = table(LRScheduler)
    training: Training = table(Training)
    data: Data = table(Data)
    parallelism: Parallelism = table(Parallelism)
    checkpoint: Checkpoint = table(Checkpoint)
    activation_checkpoint: ActivationCheckpoint = table(ActivationCheckpoint)
    compile: Compile = table(Compile)
    quantize: Quantize = table(Quantize)
    comm: Comm = table(Comm)
    memory_estimation: MemoryEstimation = table(MemoryEstimation)
    validation: ValidationTable = table(ValidationTable)
    debug: Debug = table(Debug)
