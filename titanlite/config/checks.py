"""What no single key shows: keys titanlite does not do, keys of older files, values that contradict each other."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titanlite.config import messages
from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.models.flavors import FLAVORS
from titanlite.models.sizes import sizes_of

Origins = dict[tuple[str, ...], str]

UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "experimental": ("experimental features", ({},)),
    "fault_tolerance": ("torchft", ({}, {"enable": False})),
    "quantize.grouped_mm": ("grouped matmuls in low precision, which are for mixtures of experts,", ({},)),
    "quantize.linear.mx": ("MX formats", ({},)),
    "parallelism.expert_parallel_degree": ("mixtures of experts", (1,)),
    "parallelism.expert_tensor_parallel_degree": ("mixtures of experts", (1,)),
    "parallelism.expert_parallel_comm_backend": ("mixtures of experts", ("standard",)),
    "parallelism.pipeline_parallel_expert_parallel_overlap": ("mixtures of experts", (True, False)),
    "checkpoint.enable_ft_dataloader_checkpoints": ("torchft", (True, False)),
    "checkpoint.initial_load_in_hf_quantized": ("loading quantised weights", (False,)),
    "debug.moe_force_load_balance": ("mixtures of experts", (False,)),
    "job.custom_config_module": ("custom config modules", ("",)),
    "metrics.enable_wandb": ("Weights & Biases", (False,)),
}
"""Keys of the dialect that titanlite does not do: what they are for, and the values that mean off."""

RENAMED = {
    "float8": "quantize.linear.float8",
    "mx": "quantize.linear.mx",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatch_size",
    "experimental.pipeline_parallel_split_points": "parallelism.module_fqns_per_model_part",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.enable_compiled_autograd": "compile.enable",
    "model.tokenizer_path": "model.hf_assets_path",
    "model.norm_type": "model.norm_eps",
    "training.batch_size": "training.local_batch_size",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.enable_loss_parallel": "parallelism.disable_loss_parallel",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.compile": "compile.enable",
    "training.enable_float8_linear": "quantize.linear.float8.recipe_name",
    "optimizer.fused": "optimizer.implementation",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.interval_type": "checkpoint.time_interval_minutes",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "job.use_for_integration_test": "job.description",
}
"""Keys of older files, and today's."""

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ONE_STAGE = ("1F1B", "GPipe")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def is_elsewhere(path: tuple[str, ...]) -> bool:
    """Whether a key that titanlite does not have is one of the dialect or of older files."""
    names = {".".join(path[:n]) for n in range(1, len(path) + 1)}
    return bool(names & (UNSUPPORTED.keys() | RENAMED.keys()))


def refuse_unsupported(given: dict[str, Any], origins: Origins) -> None:
    """Refuse keys that are not done unless they are off, and name today's key for those of older files.

    Keys that are off are taken out of ``given``.
    """
    for old, new in RENAMED.items():
        path = tuple(old.split("."))
        if _get(given, path) is not None:
            raise UserError(f"{messages.place(path, origins)}: this key of older files is {new} today")
    for name, (what, off) in UNSUPPORTED.items():
        path = tuple(name.split("."))
        value = _get(given, path)
        if value is None:
            continue
        if value not in off:
            raise UserError(
                f"{messages.place(path, origins)}: titanlite does not support {what} yet; leave the key out"
            )
        inner = given
        for part in path[:-1]:
            inner = inner[part]
        del inner[path[-1]]


def _get(values: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


class _Checker:
    """The config with what its messages need."""

    def __init__(self, config: Config, world_size: int, origins: Origins):
        self.config, self.world_size, self.origins = config, world_size, origins

    def refuse(self, name: str, message: str) -> None:
        raise UserError(f"{messages.place(tuple(name.split('.')), self.origins)}: {message}")

    def require(self, holds: bool, name: str, message: str) -> None:
        if not holds:
            self.refuse(name, message)


def refuse_contradictions(config: Config, world_size: int, origins: Origins) -> None:
    """Refuse values that are fine alone but not together, on ``world_size`` processes."""
    checker = _Checker(config, world_size, origins)
    for check in CHECKS:
        check(checker)


def _model(c: _Checker) -> None:
    model = c.config.model
    flavors = FLAVORS[model.name]
    c.require(
        model.flavor in flavors,
        "model.flavor",
        f"{model.name} has no flavor {model.flavor!r}; it has {', '.join(flavors)}",
    )
    sizes = sizes_of(model)
    c.require(
        sizes.n_heads % sizes.n_kv_heads == 0,
        "model.n_kv_heads",
        f"n_heads = {sizes.n_heads} is not a multiple of n_kv_heads = {sizes.n_kv_heads}",
    )
    c.require(sizes.head_dim % 2 == 0 and sizes.head_dim > 0, "model.head_dim", f"must be even, not {sizes.head_dim}")
    c.require(
        "dim" not in model.model_fields_set or model.head_dim is not None or sizes.dim % sizes.n_heads == 0,
        "model.dim",
        f"dim = {sizes.dim} is not a multiple of n_heads = {sizes.n_heads}",
    )
    path = model.hf_assets_path
    if path != "bytes":
        c.require(Path(path).exists(), "model.hf_assets_path", f"{path} does not exist; `bytes` needs no files")


def _degrees(c: _Checker) -> None:
    p = c.config.parallelism
    shard = p.data_parallel_shard_degree
    c.require(
        shard == -1 or shard > 0, "parallelism.data_parallel_shard_degree", f"must be -1 or at least 1, not {shard}"
    )
    others = (
        p.data_parallel_replicate_degree
        * p.tensor_parallel_degree
        * p.pipeline_parallel_degree
        * p.context_parallel_degree
    )
    names = {
        "data_parallel_replicate_degree": p.data_parallel_replicate_degree,
        "tensor_parallel_degree": p.tensor_parallel_degree,
        "pipeline_parallel_degree": p.pipeline_parallel_degree,
        "context_parallel_degree": p.context_parallel_degree,
    }
    largest = max(names, key=lambda name: names[name])
    told = " x ".join(f"{name} {size}" for name, size in names.items() if size > 1) or "the degrees"
    if shard == -1:
        c.require(
            c.world_size % others == 0 and c.world_size >= others,
            f"parallelism.{largest}",
            f"{told} = {others} does not divide the {c.world_size} processes of this run; "
            f"set NGPU to a multiple of {others}",
        )
    else:
        product = others * shard
        c.require(
            product == c.world_size,
            "parallelism.data_parallel_shard_degree",
            f"{told} x data_parallel_shard_degree {shard} = {product}, but this run has {c.world_size} processes; "
            f"set NGPU={product}, or data_parallel_shard_degree = -1 to take what is left",
        )
    reshard = p.fsdp_reshard_after_forward
    if isinstance(reshard, int):
        ranks = _shards(c) * p.context_parallel_degree
        c.require(
            ranks % reshard == 0,
            "parallelism.fsdp_reshard_after_forward",
            f"{reshard} does not divide the {ranks} ranks that weights are sharded over",
        )


def _shards(c: _Checker) -> int:
    p = c.config.parallelism
    others = p.data_parallel_replicate_degree * p.tensor_parallel_degree
    others *= p.pipeline_parallel_degree * p.context_parallel_degree
    return c.world_size // others if p.data_parallel_shard_degree == -1 else p.data_parallel_shard_degree


def _batch(c: _Checker) -> None:
    t, p = c.config.training, c.config.parallelism
    data = _shards(c) * p.data_parallel_replicate_degree
    size = t.global_batch_size
    c.require(size == -1 or size > 0, "training.global_batch_size", f"must be -1 or at least 1, not {size}")
    rows = t.local_batch_size
    if size > 0:
        c.require(
            size % data == 0,
            "training.global_batch_size",
            f"{size} rows cannot be dealt evenly to {data} data-parallel ranks; "
            f"take a multiple of {data}, such as {max(data, size // data * data)}",
        )
        rows = size // data
        micro = min(rows, t.local_batch_size)
        c.require(
            rows % micro == 0,
            "training.local_batch_size",
            f"the {rows} rows of a rank are not a multiple of the micro-batch of {t.local_batch_size}; "
            f"take {math.gcd(rows, t.local_batch_size)}",
        )
    if p.pipeline_parallel_degree > 1:
        local, micro = min(rows, t.local_batch_size), p.pipeline_parallel_microbatch_size
        c.require(
            local % micro == 0,
            "parallelism.pipeline_parallel_microbatch_size",
            f"{micro} does not divide the {local} rows of a local batch",
        )


def _tensor(c: _Checker) -> None:
    p = c.config.parallelism
    tp = p.tensor_parallel_degree
    sizes = sizes_of(c.config.model)
    if p.enable_async_tensor_parallel:
        c.require(
            c.config.compile.enable and "model" in c.config.compile.components,
            "parallelism.enable_async_tensor_parallel",
            "asynchronous tensor parallelism is made by the compiler: set compile.enable with component model",
        )
        c.require(tp > 1, "parallelism.enable_async_tensor_parallel", "needs tensor_parallel_degree above 1")
    if tp == 1:
        return
    counted = {
        "n_heads": sizes.n_heads,
        "n_kv_heads": sizes.n_kv_heads,
        "vocab_size": sizes.vocab_size,
        "ffn_dim": sizes.ffn_dim,
    }
    for name, size in counted.items():
        fits = [d for d in range(1, tp + 1) if all(s % d == 0 for s in counted.values())]
        c.require(
            size % tp == 0,
            "parallelism.tensor_parallel_degree",
            f"{tp} does not divide model.{name} = {size}; "
            f"the largest degree up to it that fits this model is {fits[-1]}",
        )
    seq = c.config.training.seq_len
    c.require(
        seq % (tp * p.context_parallel_degree) == 0,
        "training.seq_len",
        f"{seq} must be a multiple of tensor_parallel_degree x context_parallel_degree = "
        f"{tp * p.context_parallel_degree}; "
        f"take {_next(seq, tp * p.context_parallel_degree)}",
    )
    if c.config.validation.enable:
        length = c.config.validation.seq_len
        c.require(
            length % (tp * p.context_parallel_degree) == 0,
            "validation.seq_len",
            f"{length} must be a multiple of {tp * p.context_parallel_degree}",
        )


def _next(size: int, divisor: int) -> int:
    return math.ceil(size / divisor) * divisor


def _context(c: _Checker) -> None:
    p = c.config.parallelism
    cp = p.context_parallel_degree
    if cp == 1:
        return
    divisor = cp * (2 if p.context_parallel_load_balancer else 1) * p.tensor_parallel_degree
    lengths = {"training.seq_len": c.config.training.seq_len}
    if c.config.validation.enable:
        lengths["validation.seq_len"] = c.config.validation.seq_len
    for name, length in lengths.items():
        c.require(
            length % divisor == 0,
            name,
            f"{length} must be a multiple of {divisor}: context_parallel_degree {cp}"
            f"{', twice for the head-tail balance' if p.context_parallel_load_balancer else ''}"
            f"{f', times tensor_parallel_degree {p.tensor_parallel_degree}' if p.tensor_parallel_degree > 1 else ''}; "
            f"take {_next(length, divisor)}",
        )


def _pipeline(c: _Checker) -> None:
    p = c.config.parallelism
    pp, name = p.pipeline_parallel_degree, p.pipeline_parallel_schedule
    known = {one.lower(): one for one in SCHEDULES}
    c.require(
        name.lower() in known or bool(p.pipeline_parallel_schedule_csv),
        "parallelism.pipeline_parallel_schedule",
        f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}",
    )
    csv = p.pipeline_parallel_schedule_csv
    if csv:
        c.require(Path(csv).is_file(), "parallelism.pipeline_parallel_schedule_csv", f"{csv} does not exist")
    if pp == 1:
        return
    sizes = sizes_of(c.config.model)
    c.require(
        not sizes.tie_embeddings,
        "parallelism.pipeline_parallel_degree",
        "tied embeddings would lie on the first and the last stage at once; "
        "set model.tie_embeddings = false, or no pipeline",
    )
    schedule = known.get(name.lower(), name)
    stages = pp
    if p.module_fqns_per_model_part is not None:
        stages = len(p.module_fqns_per_model_part)
    elif p.pipeline_parallel_layers_per_stage is not None:
        weight = (
            sizes.n_layers + p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
        )
        stages = math.ceil(weight / p.pipeline_parallel_layers_per_stage)
    elif schedule not in ONE_STAGE:
        stages = 2 * pp
    c.require(
        stages % pp == 0,
        "parallelism.pipeline_parallel_degree",
        f"{stages} stages cannot be dealt evenly to {pp} pipeline ranks",
    )
    if not csv:
        if schedule in ONE_STAGE:
            c.require(
                stages == pp,
                "parallelism.pipeline_parallel_schedule",
                f"{schedule} takes one stage a rank, not {stages // pp}",
            )
        elif schedule in V_SHAPED:
            c.require(
                stages == 2 * pp,
                "parallelism.pipeline_parallel_schedule",
                f"{schedule} takes two stages a rank, not {stages / pp:g}",
            )
        else:
            c.require(
                stages >= 2 * pp,
                "parallelism.pipeline_parallel_schedule",
                f"{schedule} takes two stages a rank or more, not {stages // pp}",
            )
    extra = p.pipeline_parallel_first_stage_less_layers + p.pipeline_parallel_last_stage_less_layers
    c.require(
        sizes.n_layers + min(extra, 2) >= stages and sizes.n_layers + 2 >= stages,
        "parallelism.pipeline_parallel_degree",
        f"{sizes.n_layers} blocks are too few for {stages} stages",
    )
    micros = min(_rows(c), c.config.training.local_batch_size) // p.pipeline_parallel_microbatch_size
    if schedule in V_SHAPED or schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"):
        needed = 2 * pp if schedule == "DualPipeV" else pp if schedule != "LoopedBFS" else 1
        c.require(
            micros >= needed and (schedule not in ("Interleaved1F1B", "InterleavedZeroBubble") or micros % pp == 0),
            "training.local_batch_size",
            f"{schedule} on {pp} ranks needs a multiple of {needed} micro-batches, but a local batch has {micros}; "
            f"take local_batch_size = {_next(max(micros, needed), needed) * p.pipeline_parallel_microbatch_size}",
        )


def _rows(c: _Checker) -> int:
    t, p = c.config.training, c.config.parallelism
    data = _shards(c) * p.data_parallel_replicate_degree
    return t.global_batch_size // data if t.global_batch_size > 0 else t.local_batch_size


def _memory(c: _Checker) -> None:
    ac, t = c.config.activation_checkpoint, c.config.training
    option = ac.selective_ac_option
    if ac.mode == "selective":
        c.require(
            option == "op" or (option.isdigit() and int(option) > 0),
            "activation_checkpoint.selective_ac_option",
            f"{option!r} is not allowed; it must be 'op' or a whole number from 1 on",
        )
    if ac.mode == "memory_budget":
        c.require(
            c.config.compile.enable, "activation_checkpoint.mode", "memory_budget is the compiler's: set compile.enable"
        )
    c.require(
        ac.determinism_check in ("default", "none"),
        "activation_checkpoint.determinism_check",
        f"{ac.determinism_check!r} is not allowed; it must be 'default' or 'none'",
    )
    float8 = c.config.quantize.linear.float8
    if float8.enable_fsdp_float8_all_gather or float8.precompute_float8_dynamic_scale_for_fsdp:
        c.require(
            float8.recipe_name in (None, "tensorwise"),
            "quantize.linear.float8.recipe_name",
            f"float8 all-gather goes with tensorwise scales, not {float8.recipe_name}",
        )
    if c.config.optimizer.early_step_in_backward:
        name = "optimizer.early_step_in_backward"
        c.require(
            t.max_norm == 0,
            name,
            "a gradient that is stepped on at once cannot be clipped by the global norm: set training.max_norm = 0",
        )
        c.require(
            _rows(c) <= t.local_batch_size,
            name,
            "there is no gradient accumulation: raise training.local_batch_size to the rows of a rank",
        )
        c.require(
            c.config.parallelism.pipeline_parallel_degree == 1,
            name,
            "does not go with pipeline stages, whose micro-batches accumulate",
        )
        c.require(
            t.on_nonfinite == "stop", name, "a step already taken cannot be skipped: set training.on_nonfinite = 'stop'"
        )
        c.require(t.mixed_precision_param != "float16", name, "does not go with the loss scale of float16")
        c.require(c.config.optimizer.name != "Muon", name, "is for AdamW and Adam")
        c.require(not t.enable_cpu_offload, name, "does not go with training.enable_cpu_offload")


def _data(c: _Checker) -> None:
    t, v, data = c.config.training, c.config.validation, c.config.data
    if data.sources:
        names = [source.name for source in data.sources]
        c.require(len(set(names)) == len(names), "data.sources", f"two sources have one name: {', '.join(names)}")
        for source in data.sources:
            _dataset(c, "data.sources", source.dataset, source.path)
        c.require(
            "dataset" not in t.model_fields_set or t.dataset == "embedded",
            "training.dataset",
            "is not used beside data.sources; leave one of them out",
        )
    else:
        _dataset(c, "training.dataset_path", t.dataset, t.dataset_path)
    if v.enable:
        _dataset(c, "validation.dataset_path", v.dataset, v.dataset_path)
    c.require(
        data.packing == "greedy" or t.pack_documents,
        "data.packing",
        "best_fit packs documents; training.pack_documents = false forbids it",
    )


def _dataset(c: _Checker, name: str, dataset: str, path: str | None) -> None:
    if dataset in ("embedded", "hf"):
        c.require(path is not None or dataset == "embedded", name, "dataset hf needs a path or a dataset's name")
        return
    c.require(path is not None, name, f"dataset {dataset!r} needs a path; dataset 'embedded' needs none")
    assert path is not None
    if not any(sign in path for sign in "*?["):
        c.require(Path(path).exists(), name, f"{path} does not exist")


def _schedule(c: _Checker) -> None:
    s, steps = c.config.lr_scheduler, c.config.training.steps
    if s.total_steps is not None and "warmup_steps" in s.model_fields_set:
        c.require(
            s.warmup_steps <= s.total_steps,
            "lr_scheduler.warmup_steps",
            f"{s.warmup_steps} steps of warm-up do not fit a schedule of {s.total_steps}",
        )
    if s.decay_ratio is not None and "warmup_steps" in s.model_fields_set:
        total = s.total_steps or steps
        c.require(
            s.warmup_steps + round(total * s.decay_ratio) <= total,
            "lr_scheduler.decay_ratio",
            f"warm-up {s.warmup_steps} and decay {round(total * s.decay_ratio)} are longer than the schedule of "
            f"{total} steps",
        )


def _checkpoint(c: _Checker) -> None:
    k = c.config.checkpoint
    c.require(k.load_step >= -1, "checkpoint.load_step", f"must be -1 or a step, not {k.load_step}")
    if k.initial_load_path is not None:
        c.require(
            Path(k.initial_load_path).exists(), "checkpoint.initial_load_path", f"{k.initial_load_path} does not exist"
        )
    c.require(
        not k.initial_load_in_hf or k.initial_load_path is not None,
        "checkpoint.initial_load_in_hf",
        "needs initial_load_path: a folder with safetensors",
    )
    c.require(
        not k.initial_load_in_hf or k.initial_load_model_only,
        "checkpoint.initial_load_model_only",
        "safetensors hold weights alone: must be true",
    )
    known = {"optimizer", "lr_scheduler", "dataloader", "train_state"}
    for name in k.exclude_from_loading:
        c.require(name in known, "checkpoint.exclude_from_loading", f"{name!r} is none of {', '.join(sorted(known))}")
    c.require(
        not k.create_seed_checkpoint or (c.world_size == 1 and k.enable),
        "checkpoint.create_seed_checkpoint",
        "needs checkpoint.enable and one process: NGPU=1",
    )
    folder = Path(c.config.job.dump_folder)
    for parent in (folder, *folder.parents):
        if parent.exists():
            c.require(parent.is_dir(), "job.dump_folder", f"{parent} is a file; it must be a folder")
            c.require(os.access(parent, os.W_OK), "job.dump_folder", f"{parent} cannot be written to")
            break
    whole = folder / (c.config.job.run_id or "") / k.folder
    c.require(not whole.exists() or whole.is_dir(), "checkpoint.folder", f"{whole} is a file; it must be a folder")
    run_id = c.config.job.run_id
    c.require(run_id is None or run_id == Path(run_id).name != "..", "job.run_id", f"{run_id!r} must be a plain name")


FAULT = re.compile(r"(nan|kill|hang)@\d+:\d+$|slow@\d+:\d+:\d+(\.\d+)?$")


def _debug(c: _Checker) -> None:
    for fault in c.config.debug.faults:
        c.require(
            FAULT.match(fault) is not None,
            "debug.faults",
            f"{fault!r} is not allowed; faults are nan@step:rank, kill@step:rank, hang@step:rank, "
            "slow@step:rank:seconds",
        )
    v = c.config.validation
    c.require(v.steps == -1 or v.steps > 0, "validation.steps", f"must be -1 or at least 1, not {v.steps}")
    for rank in c.config.profiling.ranks:
        c.require(rank < c.world_size, "profiling.ranks", f"there is no rank {rank} among {c.world_size}")


CHECKS: tuple[Callable[[_Checker], None], ...] = (
    _model,
    _degrees,
    _batch,
    _tensor,
    _context,
    _pipeline,
    _memory,
    _data,
    _schedule,
    _checkpoint,
    _debug,
)
