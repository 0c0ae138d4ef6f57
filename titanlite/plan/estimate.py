"""The closed form put together: one ``Estimate`` of a workload on a kind of device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from titanlite.plan.communication import Collective, collectives
from titanlite.plan.hardware import Device
from titanlite.plan.memory import Memory, memory
from titanlite.plan.time import Time, step_time
from titanlite.plan.workload import Workload, from_config

if TYPE_CHECKING:
    from titanlite.config import Config


@dataclass(frozen=True)
class Estimate:
    """What a step needs and takes; ``memories`` and ``traffic`` are by pipeline rank."""

    workload: Workload
    device: Device
    memories: tuple[Memory, ...]
    traffic: tuple[tuple[Collective, ...], ...]
    time: Time

    @property
    def tokens_per_second_per_device(self) -> float:
        """Of the global batch's tokens."""
        return self.workload.global_tokens / self.time.total / self.workload.gpus

    @property
    def model_flops(self) -> float:
        """The model's operations a second on each device; recomputation does not count."""
        return self.tokens_per_second_per_device * self.workload.flops_per_token

    @property
    def mfu(self) -> float:
        """Of the peak in the compute type (bf16's with float8 too)."""
        return self.model_flops / self.device.peak(self.workload.compute_bytes)

    @property
    def peak_gib(self) -> float:
        """What the allocator takes on the worst pipeline rank, as ``torch.cuda.max_memory_reserved`` counts."""
        return max(each.total for each in self.memories) / 2**30

    @property
    def fits(self) -> bool:
        """Whether the worst rank fits the device."""
        return self.peak_gib + self.device.reserved_gib <= self.device.memory_gib

    @property
    def binds(self) -> str:
        """What most limits the speed: computation, the links, the network or the pipeline's bubble."""
        t = self.time
        waits = {
            "pipeline bubble": t.bubble,
            "tensor-parallel communication": t.tensor_parallel,
            "data-parallel communication": t.data_parallel,
            "context and pipeline communication": t.other_communication,
            "memory bandwidth": t.elementwise + t.optimizer,
        }
        worst = max(waits, key=waits.__getitem__)
        return worst if waits[worst] > 0.12 * t.total else "arithmetic"

    def as_dict(self) -> dict[str, Any]:
        """The JSON keys that scripts read."""
        return {
            "gpu": self.device.name,
            "gpus": self.workload.gpus,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "tflops_per_device": self.model_flops / 1e12,
            "mfu": self.mfu,
            "step_seconds": self.time.total,
            "seconds": asdict(self.time),
            "memory_peak_gib": self.peak_gib,
            "memory_gib": [each.gib() for each in self.memories],
            "collectives": [[c.as_dict(self.device, self.workload) for c in rank] for rank in self.traffic],
            "fits": self.fits,
            "binds": self.binds,
        }


def estimate(w: Workload, device: Device) -> Estimate:
    """The closed form of ``w`` on ``device``."""
    ranks = range(len(w.stages))
    return Estimate(
        workload=w,
        device=device,
        memories=tuple(memory(w, rank, device) for rank in ranks),
        traffic=tuple(tuple(collectives(w, rank)) for rank in ranks),
        time=step_time(w, device),
    )


def of_config(config: Config, world_size: int, device: Device) -> Estimate:
    """The closed form of a config on ``world_size`` devices."""
    return estimate(from_config(config, world_size, on_cpu=device.name == "cpu"), device)
