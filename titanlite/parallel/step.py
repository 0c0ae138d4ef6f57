"""Forward and backward over a batch, micro-batch by micro-batch, where the model is whole on this rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanlite.data.batch import Batch
from titanlite.models.decoder import Decoder


class Whole:
    """Gradient accumulation over a model that is not cut into pipeline stages.

    ``Pipelined`` in ``pipeline.py`` is the other class with these two methods.

    Args:
        micro_batch: rows at a time.
        finish: called after the last backward, for what is left to do to the gradients.
    """

    def __init__(
        self, model: Decoder, micro_batch: int, device: torch.device, finish: Callable[[], None] | None = None
    ):
        self.model = model
        self.finish = finish
        self.micro_batch = micro_batch
        self.device = device

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        """Accumulate the gradients of ``scale`` times the summed loss of ``batch``; returns that sum, 0-dim fp32.

        Gradients are reduced over the data-parallel ranks with the last micro-batch only.
        """
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        micros = batch.split(self.micro_batch)
        for i, micro in enumerate(micros):
            self._synchronise(i == len(micros) - 1)
            loss = self._loss(micro)
            (loss * scale).backward()
            total += loss.detach()
        if self.finish is not None:
            self.finish()
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The summed loss of ``batch``, 0-dim fp32, without gradients."""
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for micro in batch.split(self.micro_batch):
            total += self._loss(micro)
        return total

    def _loss(self, micro: Batch) -> Tensor:
        micro = micro.to(self.device)
        return self.model(micro.tokens, micro.labels, micro.positions, micro.documents)

    def _synchronise(self, last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            # Not set_is_last_backward as well: it keeps FSDP's prefetch order from one micro-batch to the next, and the
            # last one then gathers a group that nobody needs.
            self.model.set_requires_gradient_sync(last)
