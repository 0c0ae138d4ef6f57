"""Checks of values that are fine alone but not together, and of paths that are not there."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from titanlite.config import layout
from titanlite.config.checker import Checker, Origins
from titanlite.config.schema import Config
from titanlite.models.flavors import FLAVORS

BYTE_VOCABULARY = 320
"""Size of the embedded byte tokenizer's vocabulary."""


def refuse_contradictions(config: Config, world_size: int, origins: Origins) -> None:
    """Refuse values that are fine alone but not together, on ``world_size`` processes.

    Raises:
        UserError: for the first one found.
    """
    checker = Checker(config, world_size, origins)
    for check in CHECKS:
        check(checker)


def _model(c: Checker) -> None:
    model = c.config.model
    flavors = FLAVORS[model.name]
    c.require(
        model.flavor in flavors,
        "model.flavor",
        f"{model.name} has no flavor {model.flavor!r}; it has {', '.join(flavors)}",
    )
    sizes = c.sizes
    c.require(
        sizes.n_heads % sizes.n_kv_heads == 0,
        "model.n_kv_heads" if c.given("model.n_kv_heads") else "model.n_heads",
        f"n_heads = {sizes.n_heads} is not a multiple of n_kv_heads = {sizes.n_kv_heads}",
    )
    c.require(
        model.head_dim is not None
        or not (c.given("model.dim") or c.given("model.n_heads"))
        or sizes.dim % sizes.n_heads == 0,
        "model.dim" if c.given("model.dim") else "model.n_heads",
        f"dim = {sizes.dim} is not a multiple of n_heads = {sizes.n_heads}; set model.head_dim if that is meant",
    )
    c.require(
        sizes.head_dim > 0 and sizes.head_dim % 2 == 0,
        "model.head_dim" if c.given("model.head_dim") else "model.dim",
        f"a head's width must be even, not {sizes.head_dim}",
    )
    path = model.hf_assets_path
    if path == "bytes":
        c.require(
            sizes.vocab_size >= BYTE_VOCABULARY,
            "model.vocab_size",
            f"{sizes.vocab_size} is less than the {BYTE_VOCABULARY} tokens of the byte tokenizer",
        )
    else:
        c.require(os.path.exists(path), "model.hf_assets_path", f"{path} does not exist; `bytes` needs no files")


def _needs(c: Checker, wanted: bool, package: str, extra: str, name: str) -> None:
    missing = wanted and importlib.util.find_spec(package) is None
    c.require(not missing, name, f"needs the package {package}: pip install 'titanlite[{extra}]'")


def _memory(c: Checker) -> None:
    ac = c.config.activation_checkpoint
    option = ac.selective_ac_option
    c.require(
        ac.mode != "selective" or option == "op" or (option.isdecimal() and int(option) > 0),
        "activation_checkpoint.selective_ac_option",
        f"{option!r} is not allowed; it must be 'op' or a whole number from 1 on, in quotes",
    )
    c.require(
        ac.mode != "memory_budget" or (c.config.compile.enable and "model" in c.config.compile.components),
        "activation_checkpoint.mode",
        "memory_budget is the compiler's: set compile.enable, with model in compile.components",
    )
    c.require(
        ac.mode != "memory_budget" or c.config.parallelism.tensor_parallel_degree == 1,
        "activation_checkpoint.mode",
        "the compiler cannot weigh tensor parallelism's meshes against a memory_budget: take mode selective or full",
    )
    c.require(
        not ac.debug or ac.mode != "selective" or option != "op",
        "activation_checkpoint.debug",
        "does not go with selective_ac_option 'op', whose own bookkeeping takes its place",
    )
    float8 = c.config.quantize.linear.float8
    gathers = float8.enable_fsdp_float8_all_gather or float8.precompute_float8_dynamic_scale_for_fsdp
    c.require(
        not gathers or float8.recipe_name in (None, "tensorwise"),
        "quantize.linear.float8.recipe_name",
        f"float8 all-gather goes with tensorwise scales, not {float8.recipe_name}",
    )
    _needs(c, "float8" in c.config.model.converters, "torchao", "float8", "model.converters")


def _early_step(c: Checker) -> None:
    name = "optimizer.early_step_in_backward"
    t, optimizer = c.config.training, c.config.optimizer
    if not optimizer.early_step_in_backward:
        return
    c.require(t.max_norm == 0, name, "a gradient that is used at once cannot be clipped: set training.max_norm = 0")
    c.require(
        c.rows <= t.local_batch_size,
        name,
        f"there is no gradient accumulation: set training.local_batch_size to the {c.rows} rows of a rank",
    )
    c.require(
        c.config.parallelism.pipeline_parallel_degree == 1,
        name,
        "does not go with pipelines, whose gradients accumulate",
    )
    c.require(
        t.on_nonfinite == "stop" and t.spike_threshold is None,
        name,
        "a step already taken cannot be skipped: set training.on_nonfinite = 'stop', without spike_threshold",
    )
    c.require(t.mixed_precision_param != "float16", name, "does not go with the loss scale of float16")
    c.require(optimizer.name != "Muon", name, "is for AdamW and Adam")
    c.require(not t.enable_cpu_offload, name, "does not go with training.enable_cpu_offload")


def _data(c: Checker) -> None:
    t, v, data = c.config.training, c.config.validation, c.config.data
    if data.sources:
        names = [source.name for source in data.sources]
        twice = next((name for name in names if names.count(name) > 1), None)
        c.require(twice is None, "data.sources", f"two sources are called {twice!r}")
        for i, source in enumerate(data.sources):
            _dataset(c, f"data.sources.{i}.path", source.dataset, source.path)
        c.require(
            not c.given("training.dataset") or t.dataset == "embedded",
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
    c.require(v.steps == -1 or v.steps > 0, "validation.steps", f"must be -1 or at least 1, not {v.steps}")


def _dataset(c: Checker, name: str, dataset: str, path: str | None) -> None:
    if dataset == "embedded":
        c.require(path is None, name, "is not used by dataset 'embedded'; leave it out, or name the kind of the data")
        return
    c.require(path is not None, name, f"dataset {dataset!r} needs a path; dataset 'embedded' needs none")
    assert path is not None
    if dataset == "hf":
        _needs(c, True, "datasets", "hf", name)
        return
    _needs(c, dataset == "parquet", "pyarrow", "data", name)
    if any(sign in path for sign in "*?["):
        c.require(bool(glob.glob(path, recursive=True)), name, f"{path} matches no file")
    else:
        c.require(os.path.exists(path), name, f"{path} does not exist")


def _schedule(c: Checker) -> None:
    s = c.config.lr_scheduler
    total = s.total_steps or c.config.training.steps
    if c.given("lr_scheduler.warmup_steps") and c.given("lr_scheduler.total_steps"):
        c.require(
            s.warmup_steps <= total,
            "lr_scheduler.warmup_steps",
            f"{s.warmup_steps} steps of warm-up do not fit a schedule of {total}",
        )


def _checkpoint(c: Checker) -> None:
    k = c.config.checkpoint
    c.require(k.load_step >= -1, "checkpoint.load_step", f"must be -1 or a step, not {k.load_step}")
    if k.initial_load_path is not None:
        found = os.path.isdir(k.initial_load_path)
        c.require(found, "checkpoint.initial_load_path", f"there is no folder {k.initial_load_path}")
    c.require(
        not k.initial_load_in_hf or k.initial_load_path is not None,
        "checkpoint.initial_load_in_hf",
        "needs checkpoint.initial_load_path, a folder with safetensors",
    )
    c.require(
        not k.initial_load_in_hf or k.initial_load_model_only,
        "checkpoint.initial_load_model_only",
        "safetensors hold weights alone: it must be true with initial_load_in_hf",
    )
    _needs(c, k.initial_load_in_hf, "safetensors", "hf", "checkpoint.initial_load_in_hf")
    _needs(c, k.last_save_in_hf, "safetensors", "hf", "checkpoint.last_save_in_hf")
    known = ("optimizer", "lr_scheduler", "dataloader", "train_state")
    for name in k.exclude_from_loading:
        c.require(name in known, "checkpoint.exclude_from_loading", f"{name!r} is none of {', '.join(known)}")
    c.require(
        not k.create_seed_checkpoint or (c.world_size == 1 and k.enable),
        "checkpoint.create_seed_checkpoint",
        "needs checkpoint.enable and one process: NGPU=1",
    )


def _folder(c: Checker) -> None:
    job = c.config.job
    plain = job.run_id is None or (job.run_id not in ("", ".", "..") and job.run_id == os.path.basename(job.run_id))
    c.require(plain, "job.run_id", f"{job.run_id!r} must be a plain name, without folders")
    c.require(bool(job.dump_folder), "job.dump_folder", "must name a folder")
    run = os.path.join(job.dump_folder, job.run_id or "")
    c.require(_can_be_a_folder(run), "job.dump_folder", f"{run} cannot be a folder: a file is in its way")
    there = next(str(p) for p in (Path(run).absolute(), *Path(run).absolute().parents) if p.exists())
    c.require(_writable(there), "job.dump_folder", f"{there} cannot be written to")
    if c.config.checkpoint.enable:
        folder = os.path.join(run, c.config.checkpoint.folder)
        c.require(_can_be_a_folder(folder), "checkpoint.folder", f"{folder} cannot be a folder: a file is in its way")


def _can_be_a_folder(path: str) -> bool:
    there = next((p for p in (Path(path), *Path(path).parents) if os.path.lexists(p)), None)
    return there is None or there.is_dir()


def _writable(folder: str) -> bool:
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    if os.statvfs(folder).f_blocks:
        return True
    # Pseudo file systems such as /proc have no space, and give root every right but the one to make a file.
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


FAULT = re.compile(r"(nan|kill|hang)@\d+:\d+|slow@\d+:\d+:\d+(\.\d+)?")


def _debug(c: Checker) -> None:
    for fault in c.config.debug.faults:
        c.require(
            FAULT.fullmatch(fault) is not None,
            "debug.faults",
            f"{fault!r} is not allowed; faults are nan@step:rank, kill@step:rank, hang@step:rank, "
            "slow@step:rank:seconds",
        )
    for rank in c.config.profiling.ranks:
        c.require(rank < c.world_size, "profiling.ranks", f"there is no rank {rank} among {c.world_size}")


CHECKS: tuple[Callable[[Checker], None], ...] = (
    _model,
    layout.degrees,
    layout.batch,
    layout.tensor,
    layout.sequence,
    layout.pipeline,
    _memory,
    _early_step,
    _data,
    _schedule,
    _checkpoint,
    _folder,
    _debug,
)
"""In the order in which a user would want to hear of them."""
