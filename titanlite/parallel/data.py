"""Data parallelism with FSDP2: sharded (FSDP), sharded and replicated (HSDP), replicated (DDP), and mixed precision.

``fully_shard``, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. Gradients are summed, not
averaged: the loss is already divided by the tokens of the global batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from titanlite.models.decoder import Decoder

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.config.schema import Training
    from titanlite.distributed.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def apply(part: Decoder, config: Config, mesh: Mesh) -> None:
    """Shard ``part`` over ``mesh.fsdp``, blocks first, then what is left.

    One rank is wrapped too where mixed precision or offload asks for it: the policy lives in FSDP, and must hold on
    every layout. One rank without either stays plain PyTorch.
    """
    training = config.training
    mixed = training.mixed_precision_param != training.dtype
    if mesh.fsdp.size() == 1 and not mixed and not training.enable_cpu_offload:
        return
    policy = _policy(training)
    offload = _offload(training, mesh.root.device_type)

    def shard(module: nn.Module | list[nn.Module], reshard: bool | int) -> None:
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)  # type: ignore[call-overload]

    reshard = reshard_after_forward(config)
    tied = part.sizes.tie_embeddings
    if part.tok_embeddings is not None and not tied:
        shard(part.tok_embeddings, reshard)
    for block in part.layers.values():
        shard(block, reshard)
    if part.norm is not None and part.output is not None and not tied:
        # Needed again at once by the backward pass: giving the head's weight away would gather it twice.
        shard([part.norm, part.output], reshard if config.parallelism.fsdp_reshard_after_forward == "always" else False)
    shard(part, False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # gloo has no pre-multiplied sum, which a divide factor alone would choose.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def reshard_after_forward(config: Config) -> bool | int:
    """What ``fully_shard`` is told of ``fsdp_reshard_after_forward``.

    ``default`` reshards, but not under pipeline parallelism, where every micro-batch would gather the weights anew.
    """
    asked = config.parallelism.fsdp_reshard_after_forward
    if isinstance(asked, int):
        return asked
    return {"always": True, "never": False}.get(asked, config.parallelism.pipeline_parallel_degree == 1)


def _policy(training: Training) -> MixedPrecisionPolicy:
    output = training.mixed_precision_output
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[training.mixed_precision_param],
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        output_dtype=DTYPES[output] if output else None,
        cast_forward_inputs=training.cast_forward_inputs,
    )


def _offload(training: Training, device_type: str) -> OffloadPolicy:
    # Pinned memory needs an accelerator to be pinned for.
    return CPUOffloadPolicy(pin_memory=device_type != "cpu") if training.enable_cpu_offload else OffloadPolicy()
