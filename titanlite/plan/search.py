"""The best layout: every legal one, with every micro-batch, checkpointing policy and schedule, by the closed form.

The global batch stays as it is. What does not fit is dropped; the rest is ranked by tokens a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titanlite.config import Config
from titanlite.errors import UserError
from titanlite.models.sizes import DecoderSizes, sizes_of
from titanlite.plan.estimate import Estimate, estimate
from titanlite.plan.hardware import Device
from titanlite.plan.memory import memory
from titanlite.plan.time import step_time
from titanlite.plan.workload import Workload, from_config

RECOMPUTE = {
    "none": {"mode": "none"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "full": {"mode": "full"},
}
SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")


@dataclass(frozen=True)
class Found:
    """One layout: the keys that it changes, by table, and its estimate."""

    changes: dict[str, dict[str, Any]]
    estimate: Estimate

    def config(self, base: Config) -> Config:
        """``base`` with this layout."""
        return changed(base, self.changes)


@dataclass(frozen=True)
class Result:
    """Layouts, best first, and how many were tried and did not fit."""

    layouts: list[Found]
    tried: int
    too_large: int
    smallest: Found | None


def changed(config: Config, changes: dict[str, dict[str, Any]]) -> Config:
    """``config`` with other values, unchecked."""
    tables = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update=tables)


def global_rows(config: Config, gpus: int) -> int:
    """Rows of a step: as configured, or what -1 means in this layout."""
    if config.training.global_batch_size > 0:
        return config.training.global_batch_size
    return config.training.local_batch_size * from_config(config, gpus).data_size


def search(config: Config, gpus: int, device: Device, keep: int = 20) -> Result:
    """The ``keep`` fastest layouts of ``config`` on ``gpus`` devices that fit.

    Raises:
        UserError: no layout is legal.
    """
    rows = global_rows(config, gpus)
    fits: list[tuple[float, int, dict[str, dict[str, Any]], Workload]] = []
    tried = too_large = 0
    smallest: tuple[float, dict[str, dict[str, Any]], Workload] | None = None
    limit = (device.memory_gib - device.reserved_gib) * 2**30
    for changes in _candidates(config, gpus, rows, device):
        candidate = changed(config, changes)
        try:
            w = from_config(candidate, gpus, on_cpu=device.name == "cpu")
        except UserError:
            continue
        tried += 1
        peak = max(memory(w, rank, device).total for rank in {0, len(w.stages) // 2, len(w.stages) - 1})
        if peak > limit:
            too_large += 1
            if smallest is None or peak < smallest[0]:
                smallest = peak, changes, w
            continue
        fits.append((step_time(w, device).total, len(fits), changes, w))
    if not tried:
        raise UserError(f"no layout of {gpus} devices divides this model and its global batch of {rows} rows")
    seen: set[tuple[Any, ...]] = set()
    best: list[Found] = []
    # The global batch is the same for all, so the shortest step is the fastest.
    for _, _, changes, w in sorted(fits):
        key = (w.pp, w.cp, w.tp, w.dp_shard, w.recompute, w.schedule)
        if key in seen or len(best) == keep:
            continue
        seen.add(key)
        each = Found(changes, estimate(w, device))
        if each.estimate.fits:
            best.append(each)
    least = Found(smallest[1], estimate(smallest[2], device)) if smallest else None
    return Result(best, tried, too_large, least)


def _candidates(config: Config, gpus: int, rows: int, device: Device) -> Iterator[dict[str, dict[str, Any]]]:
    sizes, keys = sizes_of(config.model), config.parallelism
    balanced = 2 if keys.context_parallel_load_balancer else 1
    for tp in _divisors(gpus, min(2 * device.per_node, 64)):
        if any(n % tp for n in (sizes.n_heads, sizes.n_kv_heads, sizes.vocab_size, sizes.ffn_dim)):
            continue
        for cp in _divisors(gpus // tp, 64):
            if config.training.seq_len % (tp * cp * (balanced if cp > 1 else 1)):
                continue
            # Less than a thousand tokens a rank are never worth a piece of the sequence.
            if cp > 1 and config.training.seq_len // cp < 1024:
                continue
            for pp in _divisors(gpus // tp // cp, min(64, sizes.n_layers + 2)):
                if pp > 1 and sizes.tie_embeddings:
                    continue
                data = gpus // tp // cp // pp
                if rows % data:
                    continue
                for shard in _shards(data, device, tp * cp):
                    layout = {
                        "tensor_parallel_degree": tp,
                        "context_parallel_degree": cp,
                        "pipeline_parallel_degree": pp,
                        "data_parallel_shard_degree": shard,
                        "data_parallel_replicate_degree": data // shard,
                        "enable_async_tensor_parallel": keys.enable_async_tensor_parallel and tp > 1,
                    }
                    yield from _with_batches(layout, sizes, rows, rows // data)


def _with_batches(
    layout: dict[str, Any], sizes: DecoderSizes, rows: int, mine: int
) -> Iterator[dict[str, dict[str, Any]]]:
    pp = layout["pipeline_parallel_degree"]
    for recompute in RECOMPUTE.values():
        if pp == 1:
            for micro in _divisors(mine, 32):
                training = {"global_batch_size": rows, "local_batch_size": micro}
                yield {"parallelism": layout, "training": training, "activation_checkpoint": recompute}
            continue
        for name in SCHEDULES:
            for micro in _divisors(mine, 4):
                micros = mine // micro
                least = pp if name != "ZBVZeroBubble" else 1
                if micros < least or (name == "Interleaved1F1B" and micros % max(1, micros // pp)):
                    continue
                if name != "1F1B" and sizes.n_layers + 2 < 2 * pp:
                    continue
                pipeline = {"pipeline_parallel_schedule": name, "pipeline_parallel_microbatch_size": micro}
                pipeline |= {"pipeline_parallel_layers_per_stage": None, "module_fqns_per_model_part": None}
                pipeline |= {"pipeline_parallel_schedule_csv": ""}
                training = {"global_batch_size": rows, "local_batch_size": mine}
                yield {"parallelism": layout | pipeline, "training": training, "activation_checkpoint": recompute}


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def _shards(data: int, device: Device, inner: int) -> list[int]:
    """Shard degrees worth a look: everything, one node, eight nodes, nothing."""
    node = max(1, device.per_node // inner)
    wanted = {data, 1, node, 8 * node}
    return sorted(d for d in wanted if d <= data and data % d == 0)


def why(result: Result) -> list[str]:
    """In words: what makes the best one best, what binds it, and what the others lack."""
    if not result.layouts:
        if result.smallest is None:
            return ["No layout is legal."]
        best = result.smallest.estimate
        return [
            f"None of {result.tried} layouts fits {best.device.memory_gib:.0f} GiB: the smallest, {name(best)}, "
            f"needs {best.peak_gib:.1f} GiB. Take more devices, a smaller global batch or shorter sequences."
        ]
    best = result.layouts[0].estimate
    t = best.time
    lines = [
        f"{result.tried} layouts tried, {result.too_large} of them too large for {best.device.memory_gib:.0f} GiB.",
        f"Best: {name(best)}. {best.binds.capitalize()} binds it: of {t.total:.3g} s, {t.matmuls / t.total:.0%} are "
        f"matmuls, {t.attention / t.total:.0%} attention, {t.bubble / t.total:.0%} bubble, "
        f"{(t.tensor_parallel + t.data_parallel + t.other_communication) / t.total:.0%} communication that shows.",
    ]
    for other in result.layouts[1:]:
        w, mine = other.estimate.workload, best.workload
        differs = (w.tp, w.pp, w.cp) != (mine.tp, mine.pp, mine.cp)
        if differs:
            slower = best.tokens_per_second_per_device / other.estimate.tokens_per_second_per_device - 1
            lines.append(f"Next with other degrees: {name(other.estimate)}, {slower:.1%} slower; {lost(best, other)}.")
            break
    return lines


def lost(best: Estimate, other: Found) -> str:
    """Where another layout spends more time, by the token."""
    theirs, ours = other.estimate.time, best.time
    names = {
        "bubble": "the pipeline's bubble",
        "tensor_parallel": "tensor-parallel communication",
        "data_parallel": "data-parallel communication",
        "other_communication": "context and pipeline communication",
        "matmuls": "matmuls (recomputed or thinner ones)",
        "elementwise": "memory bandwidth",
    }
    key = max(names, key=lambda k: getattr(theirs, k) - getattr(ours, k))
    return f"it loses most to {names[key]}"


def name(e: Estimate) -> str:
    """A layout in a few words."""
    w = e.workload
    degrees = {"pp": w.pp, "rep": w.dp_replicate, "shard": w.dp_shard, "cp": w.cp, "tp": w.tp}
    text = " x ".join(f"{k} {v}" for k, v in degrees.items() if v > 1) or "one process"
    text += f", {w.micro_rows} x {w.passes} rows, recompute {w.recompute}"
    return text + (f", {w.schedule}" if w.schedule else "")
