"""Validation: the loss over the same held-out rows every time, equal on every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from titanlite.data.loader import build_validation_loader
from titanlite.errors import UserError

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.data.tokenizer import Tokenizer
    from titanlite.distributed.mesh import Mesh
    from titanlite.distributed.world import World


class Validation:
    """Evaluates every ``validation.freq`` steps; nothing where ``validation.enable`` is off."""

    def __init__(self, config: Config, tokenizer: Tokenizer, mesh: Mesh, world: World, runner: Any):
        self.settings = config.validation
        self.steps = config.training.steps
        self.mesh, self.world, self.runner = mesh, world, runner
        self.build = lambda: build_validation_loader(config, tokenizer, mesh.data_rank, mesh.data_size)

    def due(self, step: int) -> bool:
        """Whether ``step`` is followed by a validation; the last step always is."""
        return self.settings.enable and (step % self.settings.freq == 0 or step == self.steps)

    def loss(self) -> float:
        """Mean loss over the counted tokens of the validation rows; a collective over the whole world.

        The data are opened anew, so the rows are the same each time. Every rank evaluates as many batches as the
        others: a rank whose rows end first goes on with rows that count nothing.
        """
        loader = self.build()
        try:
            total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
            for batch in loader:
                loss = self.runner.evaluate(batch)
                if self.mesh.is_first_of("tp"):
                    total[0] += loss
                if self.mesh.is_first_of("tp", "cp", "pp"):
                    total[1] += batch.counted_tokens()
        finally:
            loader.close()
        if self.world.size > 1:
            dist.all_reduce(total)
        loss, tokens = total.tolist()
        if not tokens:
            raise UserError("the validation data do not fill one row: lower validation.seq_len")
        return loss / tokens
