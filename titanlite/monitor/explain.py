"""Errors of torch in words: what happened, on which rank, what to try. The error itself is kept below."""

from __future__ import annotations

import torch


def explain(error: BaseException) -> str:
    """What an error means for someone who trains a model; "" where nothing is known about it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text:
        return (
            "the device is out of memory. Lower training.local_batch_size, set activation_checkpoint.mode = 'full', raise "
            "parallelism.data_parallel_shard_degree or tensor_parallel_degree, or training.enable_cpu_offload; "
            "tools/plan.py tells what each saves"
        )
    for signs, words in _KNOWN:
        if any(sign in text for sign in signs):
            return words
    return ""


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
