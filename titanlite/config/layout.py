"""Checks of the layout: do the degrees fill the world, and do they cut the batch, the model and the sequence evenly?

Each message names a value that would work.
"""

from __future__ import annotations

import math

from titanlite.config import messages
from titanlite.config.checker import Checker
from titanlite.errors import UserError
from titanlite.parallel import schedule


def degrees(c: Checker) -> None:
    """The product of the degrees is the number of processes."""
    p = c.config.parallelism
    shard = p.data_parallel_shard_degree
    c.require(
        shard == -1 or shard > 0, "parallelism.data_parallel_shard_degree", f"must be -1 or at least 1, not {shard}"
    )
    names = (
        "data_parallel_replicate_degree",
        "tensor_parallel_degree",
        "pipeline_parallel_degree",
        "context_parallel_degree",
    )
    others = math.prod(getattr(p, name) for name in names)
    parts = [f"{name} {getattr(p, name)}" for name in names if getattr(p, name) > 1]
    if shard == -1:
        largest = max(names, key=lambda name: getattr(p, name))
        product = " x ".join(parts) + (f" = {others}" if len(parts) > 1 else "")
        c.require(
            c.world_size % others == 0,
            f"parallelism.{largest}",
            f"{product} does not divide the {_processes(c.world_size)} of this run; set NGPU to a multiple of {others}",
        )
    else:
        product = " x ".join([*parts, f"data_parallel_shard_degree {shard}"])
        product += f" = {others * shard}" if parts else ""
        c.require(
            others * shard == c.world_size,
            "parallelism.data_parallel_shard_degree",
            f"{product}, but this run has {_processes(c.world_size)}; set NGPU={others * shard}, "
            "or data_parallel_shard_degree = -1 to take what is left",
        )
    reshard = p.fsdp_reshard_after_forward
    if isinstance(reshard, int):
        ranks = c.shards * p.context_parallel_degree
        c.require(
            ranks % reshard == 0,
            "parallelism.fsdp_reshard_after_forward",
            f"{reshard} does not divide the {ranks} ranks that weights are sharded over",
        )


def _processes(count: int) -> str:
    return f"{count} process" + "es" * (count > 1)


def batch(c: Checker) -> None:
    """The global batch is dealt evenly to the data-parallel ranks, and there to micro-batches."""
    size, local = c.config.training.global_batch_size, c.config.training.local_batch_size
    c.require(size == -1 or size > 0, "training.global_batch_size", f"must be -1 or at least 1, not {size}")
    if size == -1:
        return
    c.require(
        size % c.data_size == 0,
        "training.global_batch_size",
        f"{size} rows cannot be dealt evenly to {c.data_size} data-parallel ranks; "
        f"take a multiple of {c.data_size}, such as {_next(size, c.data_size)}",
    )
    fits = max(n for n in range(1, c.micro_batch + 1) if c.rows % n == 0)
    c.require(
        c.rows % c.micro_batch == 0,
        "training.local_batch_size",
        f"the {c.rows} rows of a rank are not a multiple of the micro-batch of {local}; take {fits}",
    )


def _next(size: int, divisor: int) -> int:
    return math.ceil(size / divisor) * divisor


def tensor(c: Checker) -> None:
    """Heads, vocabulary, feed-forward and sequence are cut evenly."""
    p = c.config.parallelism
    degree = p.tensor_parallel_degree
    if p.enable_async_tensor_parallel:
        name = "parallelism.enable_async_tensor_parallel"
        compiled = c.config.compile.enable and "model" in c.config.compile.components
        c.require(compiled, name, "is made by the compiler: set compile.enable, with model among compile.components")
        c.require(degree > 1, name, "needs tensor_parallel_degree above 1")
    counted = {name: getattr(c.sizes, name) for name in ("n_heads", "n_kv_heads", "vocab_size", "ffn_dim")}
    for name, size in counted.items():
        fits = max(d for d in range(1, degree + 1) if all(other % d == 0 for other in counted.values()))
        c.require(
            size % degree == 0,
            "parallelism.tensor_parallel_degree",
            f"{degree} does not divide model.{name} = {size}; "
            f"the largest degree up to it that fits this model is {fits}",
        )


def sequence(c: Checker) -> None:
    """Context and tensor parallelism cut rows into pieces of whole tokens."""
    p = c.config.parallelism
    cp, tp = p.context_parallel_degree, p.tensor_parallel_degree
    twice = cp > 1 and p.context_parallel_load_balancer is not None
    divisor = cp * tp * (2 if twice else 1)
    why = [f"context_parallel_degree {cp}"] * (cp > 1)
    why += ["2 for its head-tail balance"] * twice
    why += [f"tensor_parallel_degree {tp}"] * (tp > 1)
    lengths = {"training.seq_len": c.config.training.seq_len}
    if c.config.validation.enable:
        lengths["validation.seq_len"] = c.config.validation.seq_len
    for name, length in lengths.items():
        c.require(
            length % divisor == 0,
            name,
            f"{length} must be a multiple of {divisor} ({' x '.join(why)}); take {_next(length, divisor)}",
        )


def pipeline(c: Checker) -> None:
    """The schedule exists, the model is cut into as many stages as it runs, and it has the micro-batches it needs."""
    p = c.config.parallelism
    schedule_key = "parallelism.pipeline_parallel_schedule" + ("_csv" if p.pipeline_parallel_schedule_csv else "")
    name = _told(c, schedule_key, lambda: schedule.schedule_name(p))
    degree = p.pipeline_parallel_degree
    if degree == 1:
        return
    c.require(
        not c.sizes.tie_embeddings,
        "parallelism.pipeline_parallel_degree",
        "the tied embedding would lie on the first and the last stage at once; "
        "set model.tie_embeddings = false, or use no pipeline",
    )
    stages_key = next(
        (key for key in ("module_fqns_per_model_part", "pipeline_parallel_layers_per_stage") if getattr(p, key)),
        "pipeline_parallel_degree",
    )
    _told(c, f"parallelism.{stages_key}", lambda: schedule.stage_modules(c.config, c.sizes.n_layers))
    c.require(
        p.fsdp_reshard_after_forward in ("default", "never") or not schedule.splits_backward(p),
        "parallelism.fsdp_reshard_after_forward",
        f"{p.fsdp_reshard_after_forward!r} gives weights away that schedule {name} still takes gradients of, which "
        'would be lost; take "default", or another schedule',
    )
    ac = c.config.activation_checkpoint
    c.require(
        ac.mode != "selective" or ac.selective_ac_option != "op" or not schedule.splits_backward(p),
        "activation_checkpoint.selective_ac_option",
        f'"op" hands out what it kept once, and schedule {name} goes backward twice; take "1" for whole blocks, '
        "or another schedule",
    )
    size = p.pipeline_parallel_microbatch_size
    c.require(
        c.micro_batch % size == 0,
        "parallelism.pipeline_parallel_microbatch_size",
        f"{size} does not divide the {c.micro_batch} rows of a local batch",
    )
    micros = c.micro_batch // size
    # The rules of torch's schedules.
    if name in ("1F1B", "DualPipeV"):
        least = degree if name == "1F1B" else 2 * degree
        holds, more = micros >= least, least
    elif name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        least = degree
        holds, more = micros % max(1, micros // degree) == 0, _next(micros, degree)
    else:
        return
    key = "training.global_batch_size" if c.rows < c.config.training.local_batch_size else "training.local_batch_size"
    wanted = more * size * (c.data_size if key.endswith("global_batch_size") else 1)
    c.require(
        holds,
        key,
        f"{name} on {degree} ranks needs {'at least' if least == more else 'a multiple of'} {least} micro-batches "
        f"of {size}, but a local batch has {micros}; take {wanted}",
    )


def _told(c: Checker, name: str, ask):
    """What ``ask`` returns; its UserError with where the key ``name`` was given."""
    try:
        return ask()
    except UserError as error:
        where = messages.place(tuple(name.split(".")), c.origins)
        raise UserError(f"{where}: {error}") from None
