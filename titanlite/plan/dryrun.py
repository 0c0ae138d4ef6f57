"""The exact plan: the real model through the real ``parallelize`` as one rank of N, one step on fake tensors.

Nothing is sent and nothing is computed; what is read off is what the code asked for. Blocks are alike, so two and three
of them in each stage give any number (``tests/plan/test_exact.py`` holds that against the full run). Eager: what the
compiler would save is not seen.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from titanlite.config import Config
from titanlite.models.sizes import sizes_of
from titanlite.parallel import schedule
from titanlite.plan.search import changed

if TYPE_CHECKING:
    pass

PARTS = ("parameters", "gradients", "optimizer", "rest")


@dataclass(frozen=True)
class Exact:
    """One rank's step.

    Attributes:
        phases: bytes at the worst of the forward and the backward passes and the optimizer's step, by part; ``rest`` is
            activations, logits and buffers.
        collectives: (kind, ranks) -> (calls, bytes of the whole).
        flops: operations of matmuls and attention.
        flops_by_module: those of one block, and of all that is not a block.
        seconds: what the dry run itself took.
    """

    rank: int
    pipeline_rank: int
    phases: dict[str, dict[str, float]]
    collectives: dict[tuple[str, int], tuple[float, float]]
    flops: float
    flops_by_module: dict[str, float]
    seconds: float

    @property
    def memory(self) -> dict[str, float]:
        """Bytes by part at the worst of the phases."""
        return max(self.phases.values(), key=lambda parts: sum(parts.values()))

    @property
    def peak(self) -> float:
        """Bytes at the worst moment of the step."""
        return sum(self.memory.values())

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "rank": self.rank,
            "pipeline_rank": self.pipeline_rank,
            "memory_gib": {part: value / 2**30 for part, value in self.memory.items()},
            "memory_peak_gib": self.peak / 2**30,
            "collectives": [
                {"kind": kind, "size": size, "calls": calls, "bytes": count}
                for (kind, size), (calls, count) in sorted(self.collectives.items())
            ],
            "flops": self.flops,
            "flops_by_module": self.flops_by_module,
            "seconds": self.seconds,
        }

    def text(self) -> str:
        """A few lines."""
        parts = ", ".join(f"{part} {value / 2**30:.3f}" for part, value in self.memory.items())
        lines = [
            f"rank {self.rank} (pipeline rank {self.pipeline_rank}): peak {self.peak / 2**30:.3f} GiB: {parts}",
            f"  {self.flops:.4g} operations; "
            + ", ".join(f"{name} {value:.4g}" for name, value in self.flops_by_module.items()),
        ]
        lines += [
            f"  {kind:15s} over {size:5d} ranks: {calls:8.0f} calls, {count / 2**20:12,.1f} MiB"
            for (kind, size), (calls, count) in sorted(self.collectives.items())
        ]
        return "\n".join(lines)


def main(config: Config, world_size: int) -> int:
    """What ``COMM_MODE=fake_backend`` does: one step as rank 0 of ``world_size``, and what it took; returns 0."""
    found = one_rank(config, world_size, 0)
    print(f"dry run of {world_size} processes")
    print(found.text())
    return 0


def all_ranks(config: Config, world_size: int) -> list[Exact]:
    """One plan for each pipeline rank; of more than four, the ends and their neighbours, with the rest in between.

    Between its neighbours a pipeline rank differs only in blocks and micro-batches in flight, which go evenly.
    """
    pp = config.parallelism.pipeline_parallel_degree
    if pp <= 4:
        return [one_rank(config, world_size, rank) for rank in range(pp)]
    first, second, last = (one_rank(config, world_size, rank) for rank in (0, 1, pp - 1))
    before = one_rank(config, world_size, pp - 2)
    between = [
        replace(_mix(second, before, (rank - 1) / (pp - 3)), pipeline_rank=rank, rank=rank * (world_size // pp))
        for rank in range(2, pp - 2)
    ]
    return [first, second, *between, before, last]


def one_rank(config: Config, world_size: int, pipeline_rank: int, full: bool = False) -> Exact:
    """The step of the first rank of a pipeline rank; with ``full`` every block is run instead of two and three."""
    begun = time.perf_counter()
    rank = pipeline_rank * (world_size // config.parallelism.pipeline_parallel_degree)
    config = _runnable(config)
    counts = _blocks(config, pipeline_rank)
    every = _period(config)
    most = sum(counts) / len(counts)
    if full or most <= 3 * every:
        return replace(_measure(config, world_size, rank, pipeline_rank), seconds=time.perf_counter() - begun)
    two = _measure(_shortened(config, 2 * every), world_size, rank, pipeline_rank)
    three = _measure(_shortened(config, 3 * every), world_size, rank, pipeline_rank)
    found = _mix(two, three, (most - 2 * every) / every)
    block = (three.flops - two.flops) / every / len(counts)
    modules = {"block": block, "ends": two.flops - 2 * every * len(counts) * block}
    return replace(found, flops_by_module=modules, seconds=time.perf_counter() - begun)


def _mix(a: Exact, b: Exact, share: float) -> Exact:
    """On the line through ``a`` (0) and ``b`` (1)."""

    def at(x: float, y: float) -> float:
        return x + share * (y - x)

    keys = sorted(a.collectives.keys() | b.collectives.keys())
    none = (0.0, 0.0)
    return replace(
        a,
        phases={
            phase: {part: at(parts[part], b.phases[phase][part]) for part in PARTS} for phase, parts in a.phases.items()
        },
        collectives={
            key: (
                at(a.collectives.get(key, none)[0], b.collectives.get(key, none)[0]),
                at(a.collectives.get(key, none)[1], b.collectives.get(key, none)[1]),
            )
            for key in keys
        },
        flops=at(a.flops, b.flops),
        seconds=a.seconds + b.seconds,
    )


def _runnable(config: Config) -> Config:
    """Without what needs a compiler or a GPU."""
    changes: dict[str, dict[str, Any]] = {
        "compile": {"enable": False},
        "parallelism": {"enable_async_tensor_parallel": False},
        "optimizer": {},
    }
    return changed(config, changes)


def _period(config: Config) -> int:
    """After how many blocks the checkpointing policy repeats."""
    settings = config.activation_checkpoint
    if settings.mode == "selective" and settings.selective_ac_option != "op":
        return int(settings.selective_ac_option)
    return 1


def _blocks(config: Config, pipeline_rank: int) -> list[int]:
    """Blocks of each of the rank's stages."""
    layers = sizes_of(config.model).n_layers
    if config.parallelism.pipeline_parallel_degree == 1:
        return [layers]
    modules = schedule.stage_modules(config, layers)
    mine = schedule.stages_of(pipeline_rank, len(modules), config.parallelism)
    return [sum(name.startswith("layers.") for name in modules[stage]) for stage in mine]


def _shortened(config: Config, blocks: int) -> Config:
    """The same with ``blocks`` blocks in each stage."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return changed(config, {"model": {"n_layers": blocks}})
    count = len(schedule.stage_modules(config, sizes_of(config.model).n_layers))
    stages = [[f"layers.{stage * blocks + i}" for i in range(blocks)] for stage in range(count)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return changed(
        config,
        {"model": {"n_layers": blocks * count}, "parallelism": {"module_fqns_per_model_part": stages}},
    )


def _measure(config: Config, world_size: int, rank: int, pipeline_rank: int) -> Exact:
    from titanlite.data.batch import Batch
    from titanlite.distributed import private_fake
    from titanlite.distributed.mesh import Mesh
    from titanlite.distributed.world import World
    from titanlite.optim.optimizer import Optimizers
    from titanlite.parallel.apply import parallelize, rows_per_rank
    from titanlite.plan.record import Recorder, local, storages_of

    device = torch.device("cpu")
    with ExitStack() as stack:
        group = stack.enter_context(private_fake.fake_world(rank, world_size))
        stack.enter_context(private_fake.no_pipeline_warmup())
        world = World(rank, world_size, 0, 1, device, 0, group)
        mesh = Mesh.build(config, world)
        model = parallelize(config, mesh, device, materialise=False)
        stack.enter_context(private_fake.fake_tensors())
        for part in model.parts:
            part.to_empty(device=device)
            part.tie()
        optimizers = Optimizers(list(model.parts), config)
        parameters = list(optimizers.parameters())
        state = list(optimizers.named_state().values())
        tokens = torch.zeros(rows_per_rank(config, mesh), config.training.seq_len, dtype=torch.int64)
        batch = Batch(tokens, tokens.clone(), None, None)
        recorder = Recorder([local(t.detach()) for t in (*parameters, *state)])
        with recorder, private_fake.apart_from_propagation(recorder):
            model.runner.forward_backward(batch, 1.0)
            gradients = [p.grad for p in parameters if p.grad is not None]
            recorder.phase = "optimizer"
            optimizers.step()
        kept: dict[str, list[Any]] = {"parameters": parameters, "gradients": gradients, "optimizer": state}
        known = {part: storages_of(tensors) for part, tensors in kept.items()}
        phases = {phase: _by_part(alive, known) for phase, (_, alive) in recorder.peaks.items()}
    collectives = {
        key: (float(recorder.calls[key]), float(recorder.bytes[key])) for key in recorder.calls if key[1] != 1
    }
    return Exact(rank, pipeline_rank, phases, collectives, recorder.flops, {"all": recorder.flops}, 0.0)


def _by_part(alive: dict[int, tuple[int, Any]], known: dict[str, set[int]]) -> dict[str, float]:
    found = dict.fromkeys(PARTS, 0.0)
    for storage, (size, reference) in alive.items():
        # An address may have been used again; what is known is alive still.
        lasting = reference() is not None
        part = next((part for part, storages in known.items() if lasting and storage in storages), "rest")
        found[part] += size
    return found
