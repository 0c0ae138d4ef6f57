"""Keys of the dialect that titanlite does not have: those it does not do, and those of older files."""

from __future__ import annotations

from typing import Any

from titanlite.config import messages
from titanlite.config.checker import Origins
from titanlite.errors import UserError

UNSUPPORTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "experimental": ("experimental imports", ()),
    "fault_tolerance": ("torchft", ()),
    "quantize.grouped_mm": ("mixtures of experts", ()),
    "quantize.linear.mx": ("MX formats", ()),
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
"""Keys of the dialect that titanlite does not do: what they are for, and the values that mean off.

A table is off where it says ``enable = false``, or holds nothing but empty values.
"""

RENAMED = {
    "float8.enable_float8_linear": "model.converters",
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

CONVERTERS = {
    "quantize.linear.float8": "float8",
    "quantize.linear.mx": "MX formats",
    "mx": "MX formats",
    "quantize.grouped_mm.float8": "mixtures of experts",
    "quantize.grouped_mm.mx": "mixtures of experts",
}
"""``model.converters`` by the dialect's names: float8, and what titanlite does not do."""


def is_elsewhere(path: tuple[str, ...]) -> bool:
    """Whether a key that titanlite does not have is one of the dialect or of older files."""
    names = {".".join(path[:n]) for n in range(1, len(path) + 1)}
    return bool(names & (UNSUPPORTED.keys() | RENAMED.keys()))


def refuse_others(given: dict[str, Any], origins: Origins) -> None:
    """Refuse keys that are not done unless they are off, and name today's key for those of older files.

    Keys that are off are taken out of ``given``.

    Raises:
        UserError: with where the key was given.
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
        if not (_is_off(value) if isinstance(value, dict) else value in off):
            raise UserError(f"{messages.place(path, origins)}: titanlite does not do {what}; leave the key out")
        inner = given
        for part in path[:-1]:
            inner = inner[part]
        del inner[path[-1]]
    converters = _get(given, ("model", "converters"))
    for i, name in enumerate(converters if isinstance(converters, list) else []):
        if CONVERTERS.get(str(name), "float8") != "float8":
            where = messages.place(("model", "converters"), origins)
            raise UserError(f"{where}: titanlite does not do {CONVERTERS[name]}; leave {name!r} out")
        converters[i] = CONVERTERS.get(str(name), name)


def _is_off(table: dict[str, Any]) -> bool:
    if "enable" in table:
        return table["enable"] is False
    return all(_is_off(value) if isinstance(value, dict) else not value for value in table.values())


def _get(values: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values
