"""What the console says of a run at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.models.sizes import sizes_of
from titanlite.plan import face

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.mesh import Mesh
    from titanlite.distributed.world import World


def facts(config: Config, world: World, mesh: Mesh, tokens: int, start: str) -> dict[str, str]:
    """Model, layout, plan, tokens a step and where the run starts, by name."""
    layout = " x ".join(f"{name} {size}" for name, size in mesh.describe().items() if size > 1)
    told = {
        "model": f"{config.model.name} {config.model.flavor}, {sizes_of(config.model).parameters:,} parameters",
        "layout": f"{layout or 'one process'} on {world.device.type}",
        "tokens a step": f"{tokens:,}",
        "plan": "; ".join(line.removeprefix("plan: ") for line in face.summary(config, world.device, world.size)),
        "starts at": start or "the beginning",
    }
    if mesh.pp > 1:
        from titanlite.parallel import pipeline

        rows = config.training.global_batch_size // mesh.data_size
        told["pipeline"] = pipeline.describe(config, max(0, min(rows, config.training.local_batch_size)))
    return told
