"""Devices and the links between them, as numbers. One set of constants for each kind of device.

Peaks, capacities and link rates are the makers' data sheets. The achievable shares are those that well-known
measurements give: large bf16 matmuls reach 70 to 80 % of the peak on an A100 and about 70 % on Hopper, which lowers its
clock under load; flash attention (https://arxiv.org/abs/2307.08691, https://arxiv.org/abs/2407.08608) about half of it;
NCCL about 80 % of NVLink. ``tools/bench/plan_accuracy.py`` holds them against published runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from titanlite.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A kind of device, and the node it sits in.

    Rates are a second and one way. ``*_share`` is the part of a data sheet's number that a well-written kernel gets.
    """

    name: str
    memory_gib: float
    peak_bf16: float
    peak_fp8: float
    peak_fp32: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    per_node: int = 8
    matmul_share: float = 0.63
    fp8_share: float = 0.55
    attention_share: float = 0.45
    memory_share: float = 0.80
    link_share: float = 0.75
    network_share: float = 0.85
    link_latency: float = 4e-6
    network_latency: float = 10e-6
    launch: float = 5e-6
    slowdown: float = 0.06
    """How much slower computation is while a collective runs beside it: it takes some of the processors."""
    reserved_gib: float = 1.0
    """What is not the allocator's: the driver's context and the communicators."""
    waste: float = 0.10
    """What the allocator keeps beyond what is allocated, as a share."""

    def peak(self, compute_bytes: int) -> float:
        """Operations a second at most in the type of the matmuls."""
        return self.peak_bf16 if compute_bytes == 2 else self.peak_fp32


_A100 = Device("a100", 80, 312e12, 312e12, 156e12, 2.04e12, 300e9, 25e9, matmul_share=0.80, attention_share=0.50)
_H100 = Device("h100", 80, 989e12, 1979e12, 494e12, 3.35e12, 450e9, 50e9)

DEVICES: dict[str, Device] = {
    "a100": _A100,
    "a100_40gb": replace(_A100, name="a100_40gb", memory_gib=40, memory_bandwidth=1.555e12),
    "h100": _H100,
    # The part with 96 GB of HBM2e and 500 W that some clusters have.
    "h100_96gb": replace(
        _H100, name="h100_96gb", memory_gib=95, memory_bandwidth=2.4e12, matmul_share=0.50, fp8_share=0.40
    ),
    "h100_nvl": replace(
        _H100,
        name="h100_nvl",
        memory_gib=94,
        memory_bandwidth=3.9e12,
        peak_bf16=835e12,
        peak_fp8=1671e12,
        peak_fp32=417e12,
        link_bandwidth=300e9,
        per_node=2,
    ),
    "h200": replace(_H100, name="h200", memory_gib=140, memory_bandwidth=4.8e12, matmul_share=0.68),
    "b200": Device("b200", 179, 2250e12, 4500e12, 1125e12, 8.0e12, 900e9, 50e9),
    "mi300x": Device(
        "mi300x", 191, 1307e12, 2615e12, 653e12, 5.3e12, 448e9, 50e9, matmul_share=0.50, attention_share=0.30
    ),
    # Two cores of a server; for runs without a GPU only the memory and the traffic are worth reading.
    "cpu": Device(
        "cpu", 64, 0.1e12, 0.1e12, 0.1e12, 20e9, 5e9, 1e9, waste=0.0, reserved_gib=0.0, launch=2e-5, link_latency=1e-4
    ),
}
ALIASES = {
    "a100_80gb": "a100",
    "h100_sxm": "h100",
    "h100_80gb": "h100",
    "h100_hbm2e": "h100_96gb",
}


def device(name: str, **changes: Any) -> Device:
    """The kind of device called ``name``, or described by the TOML file ``name``.

    The file has the fields of ``Device`` and may name a kind to start from:

        base = "h100"
        per_node = 4
        network_bandwidth = 25e9

    Raises:
        UserError: there is no such kind, file or field.
    """
    if name.endswith(".toml"):
        return replace(_from_file(Path(name)), **changes)
    key = name.lower().replace("-", "_").replace(" ", "_")
    key = ALIASES.get(key, key)
    if key not in DEVICES:
        raise UserError(f"there is no GPU kind {name!r}; there are {', '.join(DEVICES)}, or a TOML file of one's own")
    return replace(DEVICES[key], **changes)


def recognised(cuda_name: str) -> Device | None:
    """The kind whose product name is ``cuda_name``, or None."""
    low = cuda_name.lower()
    if "h100" in low and "nvl" in low:
        return DEVICES["h100_nvl"]
    if "a100" in low:
        return DEVICES["a100_40gb" if "40gb" in low else "a100"]
    return next((DEVICES[key] for key in ("h200", "h100", "b200", "mi300x") if key in low), None)


def _from_file(path: Path) -> Device:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cluster file {path}: {error}") from None
    base = values.pop("base", None)
    known = {field.name for field in fields(Device)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(f"cluster file {path}: unknown {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    values.setdefault("name", path.stem)
    if base is not None:
        return replace(device(base), **values)
    try:
        return Device(**values)
    except TypeError as error:
        raise UserError(f"cluster file {path}: {error}; base = 'h100' would fill what is missing") from None
