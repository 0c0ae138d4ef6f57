"""The processes of a run: who this rank is, which device it drives, how the ranks talk.

This is the only place below the launcher that reads torchrun's environment variables.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titanlite.distributed import private
from titanlite.errors import UserError

if TYPE_CHECKING:
    from titanlite.config.schema import Comm


@dataclass(frozen=True)
class World:
    """One rank's view of the run.

    ``cpu_group`` holds every rank over gloo: the default group where the device is the CPU, a second group beside
    NCCL otherwise. ``restart`` counts torchrun's restarts of this run.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    restart: int
    cpu_group: dist.ProcessGroup

    @classmethod
    def start(cls, comm: Comm) -> World:
        """Join the process group that torchrun's environment describes; without torchrun, a world of one.

        The rendezvous store is prefixed by the restart count: restarted gloo ranks would otherwise read the
        addresses of the ranks that died from the store they share with them.

        Raises:
            UserError: there are fewer GPUs on this machine than processes.
        """
        rank, size = _env("RANK", 0), _env("WORLD_SIZE", 1)
        local_rank, local_size = _env("LOCAL_RANK", rank), _env("LOCAL_WORLD_SIZE", size)
        restart = _env("TORCHELASTIC_RESTART_COUNT", 0)
        device = _device(local_rank, local_size)
        backend = "gloo" if device.type == "cpu" else "nccl"
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
        dist.init_process_group(
            backend,
            store=_store(rank, size, restart, timedelta(seconds=comm.init_timeout_seconds)),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=comm.init_timeout_seconds),
            device_id=None if device.type == "cpu" else device,
        )
        world = dist.group.WORLD
        assert world is not None
        cpu_group = world if backend == "gloo" else dist.new_group(backend="gloo")
        return cls(rank, size, local_rank, local_size, device, restart, cpu_group)

    def set_timeout(self, seconds: float) -> None:
        """Time that a collective may take from now on, on every group made so far."""
        for group in private.all_groups():
            private.set_timeout(timedelta(seconds=seconds), group)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self.cpu_group)

    def close(self) -> None:
        """End every process group; another world may be started in this process afterwards.

        gloo's threads abort the process when a group is torn down beside live tensors or after the interpreter began
        to end, so garbage is collected on both sides, after a barrier that lets every rank arrive.
        """
        if not dist.is_initialized():
            return
        try:
            self.barrier()
        except RuntimeError:
            pass  # a rank that is gone already is no reason to keep this one from ending
        self.abandon()

    def abandon(self) -> None:
        """End every process group of this rank without waiting for the others, as after an error."""
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()
            private.forget_groups()
            gc.collect()


def _env(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise UserError(f"environment variable {name} must be a whole number, not {value!r}") from None


def _device(local_rank: int, local_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"this machine has {count} GPU{'s' * (count != 1)} but {local_size} processes were started on it: "
            f"set NGPU to at most {count}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _store(rank: int, size: int, restart: int, timeout: timedelta) -> dist.Store:
    if size == 1:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=size, timeout=timeout))
    return dist.PrefixStore(f"attempt_{restart}", store)
