"""Tensor parallelism with sequence parallelism, over ``parallelize_module``.

Each matrix is cut over the ranks of the ``tp`` dimension, Megatron's way (https://arxiv.org/abs/1909.08053): the first
of a pair by columns of the result, the second by rows, so that each rank works on its share of the heads or of the
feed-forward's width and the pair costs one collective. Between the pairs every rank holds a share of the sequence
(https://arxiv.org/abs/2205.05198): the collective before a pair gathers the sequence, the one after it sums and
scatters it. Embedding and output are cut by vocabulary, and the loss never sees all of a token's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.distributed import private_tensor as private
from titanlite.errors import UserError
from titanlite.models.decoder import Decoder
from titanlite.models.loss import Output, cross_entropy_sum
from titanlite.models.registry import family

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.mesh import Mesh

SEQUENCE = 1
"""The dimension of the sequence in hidden states [batch, sequence, width]."""


def apply(part: Decoder, config: Config, mesh: Mesh) -> None:
    """Cut the parameters of ``part``, still on the meta device, over ``mesh``'s tp dimension.

    Raises:
        UserError: asynchronous tensor parallelism is asked for where it cannot be.
    """
    tp = mesh.dim("tp")
    plan = {name: STYLES[style]() for name, style in family(config.model.name).block_plan().items()}
    for block in part.layers.values():
        parallelize_module(block, tp, plan)
    if part.tok_embeddings is not None:
        part.tok_embeddings = TensorParallelEmbedding(part.tok_embeddings, tp)
    if part.norm is not None:
        parallelize_module(part.norm, tp, STYLES["sequence"]())
    if part.output is not None:
        part.output = TensorParallelOutput(part.output, tp, whole_logits=config.parallelism.disable_loss_parallel)
    part.tie()
    if config.parallelism.enable_async_tensor_parallel:
        _overlap(config, tp)


class GatherSequence(ParallelStyle):
    """The module's first argument, a share of the sequence, is gathered for it; its gradients are scattered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gathered(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return _sequence(inputs[0], device_mesh).redistribute(placements=(Replicate(),)), *inputs[1:]

        module.register_forward_pre_hook(gathered)
        return module


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": partial(RowwiseParallel, output_layouts=Shard(SEQUENCE)),
    "sequence": partial(SequenceParallel, sequence_dim=SEQUENCE),
    "gather_sequence": GatherSequence,
    # On [b, heads, s, head_dim] the shared dimension is that of the heads; the weight is every head's.
    "heads": partial(SequenceParallel, sequence_dim=1, use_local_output=True),
}
"""What a family's ``tensor_plan`` may say of a module."""


class TensorParallelEmbedding(nn.Embedding):
    """The embedding with this rank's rows of the vocabulary; each token's is on one rank, the others add zeros.

    Not ``RowwiseParallel``, whose backward makes the gradient of the whole table on every rank.
    """

    def __init__(self, embedding: nn.Embedding, tp: DeviceMesh):
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim, self.tp = embedding.num_embeddings, embedding.embedding_dim, tp
        self.weight = nn.Parameter(distribute_tensor(embedding.weight, tp, [Shard(0)]))

    def forward(self, input: Tensor) -> Tensor:
        """Tokens [b, s], the same on every rank -> this rank's share of the sequence, [b, s / tp, dim]."""
        weight = _local(self.weight)
        rows = input - self.tp.get_local_rank() * weight.shape[0]
        here = (rows >= 0) & (rows < weight.shape[0])
        found = F.embedding(rows.where(here, 0), weight) * here[..., None]
        summed = DTensor.from_local(found, self.tp, (Partial(),), run_check=False)
        return summed.redistribute(placements=(Shard(SEQUENCE),)).to_local()


class TensorParallelOutput(Output):
    """The output head with this rank's rows of the vocabulary, on hidden states that are a share of the sequence.

    Args:
        whole_logits: gather each token's logits and take the plain loss of them, on every rank, as
            ``disable_loss_parallel`` asks; else the loss is reduced over the ranks from their own logits.
    """

    def __init__(self, output: Output, tp: DeviceMesh, whole_logits: bool):
        nn.Module.__init__(self)
        self.chunks, self.group, self.tp, self.whole_logits = output.chunks, tp.get_group(), tp, whole_logits
        self.weight = nn.Parameter(distribute_tensor(output.weight, tp, [Shard(0)]))

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """hidden [b, s / tp, dim], labels [b, s] -> as ``Output.forward``, the same on every rank."""
        full = _sequence(hidden, self.tp).redistribute(placements=(Replicate(),))
        # Each rank's gradient comes from its own logits only; their sum is the gradient.
        tokens = full.to_local(grad_placements=(Partial(),))
        weight = _local(self.weight)
        if labels is None:
            return self._logits(tokens, weight)
        if self.whole_logits:
            logits = self._logits(tokens, weight).flatten(0, 1).float()
            return F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return cross_entropy_sum(tokens.flatten(0, 1), weight, labels.flatten(), self.chunks, self.group)

    def _logits(self, tokens: Tensor, weight: Tensor) -> Tensor:
        mine = DTensor.from_local(F.linear(tokens, weight), self.tp, (Shard(2),), run_check=False)
        return mine.redistribute(placements=(Replicate(),)).to_local()


def sum_partial_gradients(parts: Iterable[nn.Module], mesh: Mesh) -> None:
    """Add up over tp the gradients that each rank has only of its own share of the sequence: those of the norms.

    Called once after a step's last backward. FSDP does it by itself for what it wraps; left as they are, the copies of
    a norm would drift apart. One all-reduce carries them all.
    """
    parameters = [parameter for part in parts for parameter in part.parameters()]
    partial_ones = [
        p for p in parameters if isinstance(p.grad, DTensor) and any(x.is_partial() for x in p.grad.placements)
    ]
    if not partial_ones:
        return
    grads = [p.grad.to_local() for p in partial_ones]  # type: ignore[union-attr]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=mesh.dim("tp").get_group())
    for parameter, piece in zip(partial_ones, flat.split([grad.numel() for grad in grads]), strict=True):
        assert isinstance(parameter, DTensor)
        local = piece.view(parameter.to_local().shape)
        parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


def _local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def _sequence(hidden: Tensor, tp: DeviceMesh) -> DTensor:
    if isinstance(hidden, DTensor):
        return hidden
    return DTensor.from_local(hidden, tp, (Shard(SEQUENCE),), run_check=False)


def _overlap(config: Config, tp: DeviceMesh) -> None:
    if tp.device_type != "cuda" or not config.compile.enable or "model" not in config.compile.components:
        raise UserError(
            'parallelism.enable_async_tensor_parallel needs CUDA devices and compile.enable = true with "model" in '
            "compile.components: the compiler is what cuts the collectives into pieces behind the multiplications"
        )
    private.overlap_tensor_parallel_collectives(tp.get_group())
