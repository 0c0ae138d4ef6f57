"""What a check of the config needs: the config, the number of processes, and words that say where a key was given."""

from __future__ import annotations

from dataclasses import dataclass, field

from titanlite.config import messages
from titanlite.config.schema import Config
from titanlite.errors import UserError
from titanlite.models.sizes import DecoderSizes, sizes_of

Origins = dict[tuple[str, ...], str]
"""Where each given value came from: "file.toml:12" or "--flag"."""


@dataclass(frozen=True)
class Checker:
    """A config on ``world_size`` processes, and what checks ask about it."""

    config: Config
    world_size: int
    origins: Origins = field(default_factory=dict)

    def require(self, holds: bool, name: str, message: str) -> None:
        """Refuse the value of the key ``name`` unless ``holds``.

        Raises:
            UserError: ``message``, after where the key was given.
        """
        if not holds:
            raise UserError(f"{messages.place(tuple(name.split('.')), self.origins)}: {message}")

    def given(self, name: str) -> bool:
        """Whether a file or a flag gave the key."""
        table, key = name.rsplit(".", 1)
        return key in getattr(self.config, table).model_fields_set

    @property
    def sizes(self) -> DecoderSizes:
        """The model's sizes; only after the flavor was checked."""
        return sizes_of(self.config.model)

    @property
    def shards(self) -> int:
        """Ranks along dp_shard."""
        p = self.config.parallelism
        others = p.data_parallel_replicate_degree * p.tensor_parallel_degree
        others *= p.pipeline_parallel_degree * p.context_parallel_degree
        return self.world_size // others if p.data_parallel_shard_degree == -1 else p.data_parallel_shard_degree

    @property
    def data_size(self) -> int:
        """Ranks that the rows of the global batch are dealt to."""
        return self.shards * self.config.parallelism.data_parallel_replicate_degree

    @property
    def rows(self) -> int:
        """Rows of the global batch on one of them."""
        training = self.config.training
        asked = training.global_batch_size
        return asked // self.data_size if asked > 0 else training.local_batch_size

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch: ``local_batch_size`` is an upper bound."""
        return min(self.rows, self.config.training.local_batch_size)
