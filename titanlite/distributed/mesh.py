"""One ``DeviceMesh`` for all parallelism, and the few views of it that the rest of the code asks for.

The dimensions, from the one that spans the slowest links to the one that needs the fastest::

    pp            pipeline stages
    dp_replicate  copies of the sharded model (HSDP, DDP)
    dp_shard      FSDP shards
    cp            pieces of the sequence
    tp            pieces of each matrix

>>> mesh = Mesh.build(config, world)        # 8 ranks, tensor_parallel_degree = 2
>>> mesh.describe()
{'pp': 1, 'dp_replicate': 1, 'dp_shard': 4, 'cp': 1, 'tp': 2}
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.distributed import private

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.world import World

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Mesh:
    """The root mesh, its degrees and its flattened views.

    Attributes:
        root: the five-dimensional mesh, in the order of ``DIMENSIONS``.
        fsdp: what ``fully_shard`` takes: one dimension over dp_shard and cp (ranks of one sequence share the weights,
            so they shard them too), or two, replicas first, for HSDP and DDP.
    """

    def __init__(self, root: DeviceMesh):
        self.root = root
        sizes = dict(zip(DIMENSIONS, root.mesh.shape, strict=True))
        self.pp, self.dp_replicate = sizes["pp"], sizes["dp_replicate"]
        self.dp_shard, self.cp, self.tp = sizes["dp_shard"], sizes["cp"], sizes["tp"]
        shard = private.flatten(root, ("dp_shard", "cp"), "fsdp")
        self.fsdp = shard if self.dp_replicate == 1 else private.concatenate([root["dp_replicate"], shard])

    @classmethod
    def build(cls, config: Config, world: World) -> Mesh:
        """The mesh of ``[parallelism]`` over every rank; a shard degree of -1 takes what the others leave."""
        wanted = config.parallelism
        degrees = {
            "pp": wanted.pipeline_parallel_degree,
            "dp_replicate": wanted.data_parallel_replicate_degree,
            "dp_shard": wanted.data_parallel_shard_degree,
            "cp": wanted.context_parallel_degree,
            "tp": wanted.tensor_parallel_degree,
        }
        if degrees["dp_shard"] == -1:
            others = math.prod(size for name, size in degrees.items() if name != "dp_shard")
            degrees["dp_shard"] = world.size // others
        shape = tuple(degrees[name] for name in DIMENSIONS)
        return cls(init_device_mesh(world.device.type, shape, mesh_dim_names=DIMENSIONS))

    def dim(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh of this rank along ``name``."""
        return self.root[name]

    def rank_in(self, name: str) -> int:
        """This rank's coordinate along ``name``."""
        return self.root.get_local_rank(name)

    @property
    def data_size(self) -> int:
        """Over how many ranks the rows of the global batch are dealt."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        """Which share of the rows this rank works on; ranks that differ only in tp, cp or pp share theirs."""
        return self.rank_in("dp_replicate") * self.dp_shard + self.rank_in("dp_shard")

    def is_first_of(self, *names: str) -> bool:
        """Whether this rank comes first along each of ``names``: the one of its equals that speaks for all."""
        return all(self.rank_in(name) == 0 for name in names)

    def describe(self) -> dict[str, int]:
        """The degree of every dimension, by name."""
        return {name: getattr(self, name) for name in DIMENSIONS}
