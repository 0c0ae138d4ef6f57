"""Peak memory of the device: the CUDA allocator's, or on the CPU the process's."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Most memory held at once since the last ``reset`` (CUDA) or the start of the process (CPU)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_bytes(device: torch.device) -> int:
    """Memory that the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemTotal"].split()[0]) * 1024


def reset(device: torch.device) -> None:
    """Begin a new peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
