"""The layouts that the parity tests run: name -> the keys that make it.

Every layout accumulates (two rounds or more a step). ``COVERING`` is what the default suite runs: each dimension, each
pair of dimensions and each pipeline schedule once; ``FULL`` adds all of it with ``--full``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from titanlite.parallel.schedule import SCHEDULES

DEGREES = {
    "rep": "data_parallel_replicate_degree",
    "dp": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


class Layout(NamedTuple):
    """Degrees such as "dp2 tp2", rows of a round, and other keys of ``[parallelism]``."""

    degrees: str
    rows: int = 4
    keys: dict[str, Any] = {}
    schedule: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        size = 1
        for word in self.degrees.split():
            size *= int(word[-1])
        return size

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Readable and unique, for pytest."""
        extra = [f"{value}" for value in (self.schedule, *self.keys.values()) if value != ""]
        return "-".join([self.degrees.replace(" ", "_"), *extra])

    def tables(self) -> dict[str, dict[str, Any]]:
        """Overrides of the yardstick's tables."""
        parallelism = {name: 1 for name in DEGREES.values()} | {
            DEGREES[word.rstrip("0123456789")]: int(word[-1]) for word in self.degrees.split()
        }
        if self.schedule:
            parallelism["pipeline_parallel_schedule"] = self.schedule
        return {"parallelism": parallelism | self.keys, "training": {"local_batch_size": self.rows}}


def micro(size: int) -> dict[str, int]:
    """Rows of a pipeline micro-batch."""
    return {"pipeline_parallel_microbatch_size": size}


RING = {"context_parallel_rotate_method": "alltoall"}

COVERING = [
    Layout("dp2", 2),
    Layout("tp2"),
    Layout("cp2"),
    Layout("cp2", keys=RING | {"context_parallel_load_balancer": None}),
    *(Layout("pp2", 4, schedule=name) for name in SCHEDULES),
    Layout("rep2 dp2", 1),
    Layout("dp2 tp2", 2),
    Layout("dp2 pp2", 2, schedule="Interleaved1F1B"),
    Layout("tp2 pp2", 4, micro(2)),
    Layout("dp2 cp2", 2, RING),
    Layout("tp2 cp2"),
    Layout("cp2 pp2", 4, RING, schedule="ZBVZeroBubble"),
]

THREE = [
    Layout("dp2 tp2 pp2", 2),
    Layout("dp2 tp2 cp2", 2),
    Layout("dp2 cp2 pp2", 2),
    Layout("tp2 cp2 pp2", 4, micro(2)),
]

FULL = [
    Layout("dp4", 1),
    Layout("tp4"),
    Layout("cp4"),
    Layout("cp4", keys=RING),
    Layout("rep2 dp2 tp2", 1),
    Layout("tp4 dp2", 2),
    Layout("pp4", 4, {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}),
    *THREE,
    *(Layout("dp2 pp2", 2 if name != "DualPipeV" else 4, schedule=name) for name in SCHEDULES),
    *(Layout("tp2 pp2", 4, schedule=name) for name in SCHEDULES),
    *(Layout("cp2 pp2", 4, schedule=name) for name in SCHEDULES),
    *(Layout("dp2 tp2 pp2", 4, schedule=name) for name in ("Interleaved1F1B", "ZBVZeroBubble")),
]
