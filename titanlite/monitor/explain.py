"""Errors of torch in words: what happened, on which rank, what to try. The error itself is kept below."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from titanlite.plan import face, hardware

if TYPE_CHECKING:
    from titanlite.config import Config


def explain(error: BaseException, config: Config | None = None, world_size: int = 1) -> str:
    """What an error means for someone who trains a model; "" where nothing is known about it.

    Out of memory comes with the cheapest changes of ``config`` that would have helped, and the bytes that each saves.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return "the device is out of memory" + ("" if config is None else _ways_out(config, world_size))
    for signs, words in _KNOWN:
        if any(sign in text for sign in signs):
            return words
    return ""


def _ways_out(config: Config, world_size: int) -> str:
    device = hardware.recognised(torch.cuda.get_device_name()) if torch.cuda.is_available() else hardware.DEVICES["cpu"]
    ways = face.ways_out(config, world_size, device)
    return ". The cheapest ways out:\n" + "\n".join(f"  {way}" for way in ways) if ways else ""


_KNOWN: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error"),
        "another rank was lost while this one waited for it; its own message, above or on its node, is the cause",
    ),
    (
        ("Timed out waiting", "timed out", "timeout", "Watchdog caught collective operation timeout"),
        "a collective waited longer than comm.train_timeout_seconds (comm.init_timeout_seconds before the first step): a "
        "rank hangs, is far slower than the others, or was lost; the stacks in comm_traces of the run's folder say where",
    ),
    (
        ("EADDRINUSE", "address already in use", "Address already in use"),
        "the rendezvous port is taken, perhaps by another run on this machine: set MASTER_PORT to a free one",
    ),
    (
        ("client socket has failed to connect", "failed to connect", "Name or service not known"),
        "the first node cannot be reached: check MASTER_ADDR, MASTER_PORT and that it was started",
    ),
    (
        ("invalid device ordinal", "no CUDA-capable device"),
        "there are fewer GPUs than processes on this machine: set NGPU to their number",
    ),
    (
        ("NCCL error", "ncclInternalError", "ncclSystemError", "ncclUnhandledCudaError"),
        "NCCL failed: NCCL_DEBUG=INFO says why; often a lost rank, a network interface (NCCL_SOCKET_IFNAME) or a driver",
    ),
)
