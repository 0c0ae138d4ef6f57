"""torch.compile, block by block: one small graph that all blocks share, so the first step waits for one compilation."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import torch

from titanlite.distributed import private_compile
from titanlite.models import loss
from titanlite.models.decoder import Decoder

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.mesh import Mesh


def apply(part: Decoder, config: Config, mesh: Mesh) -> None:
    """Compile the components of ``[compile]``; without a compiler on this machine say so and leave them eager."""
    settings = config.compile
    missing = missing_compiler(settings.backend, mesh.root.device_type)
    if missing:
        print(f"compile: {missing}; the model stays eager", file=sys.stderr)
        return
    ac = config.activation_checkpoint
    budgeted = ac.mode == "memory_budget"
    private_compile.set_activation_budget(
        ac.memory_budget if budgeted else 1.0, budgeted and ac.visualize_memory_budget_pareto
    )
    if "model" in settings.components:
        for block in part.layers.values():
            block.forward = torch.compile(block.forward, backend=settings.backend, fullgraph=True)  # type: ignore[method-assign]
    if "loss" in settings.components and part.output is not None:
        part.output.plain = torch.compile(loss.plain, backend=settings.backend)


def missing_compiler(backend: str, device_type: str) -> str:
    """What inductor needs and this machine does not have, in words; "" where nothing is missing."""
    if backend != "inductor":
        return ""
    if device_type == "cuda":
        return "" if private_compile.has_triton() else "triton is not installed"
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    found = any(name and shutil.which(name) for name in compilers)
    return "" if found else "there is no C++ compiler (g++ or clang++)"
