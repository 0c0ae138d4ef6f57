"""Activation checkpointing: which activations are recomputed in the backward pass instead of kept.

``torch.utils.checkpoint``, https://arxiv.org/abs/1604.06174; per operation, https://arxiv.org/abs/2205.05198 and
``create_selective_checkpoint_contexts``. A block's ``forward`` is replaced, not wrapped in a module, so that parameter
names stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.models.decoder import Decoder

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.config.schema import ActivationCheckpoint

MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default})

EXPENSIVE = MATMULS | {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    # Recomputing a collective would communicate twice.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
"""Operations whose outputs are kept: everything else is cheap next to them."""


def is_per_operation(settings: ActivationCheckpoint) -> bool:
    """Whether the policy decides by operation; the compiler must see it then, so it is applied inside its graph."""
    return settings.mode == "selective" and settings.selective_ac_option == "op"


def apply(part: Decoder, config: Config) -> None:
    """Checkpoint the blocks of ``part`` as ``[activation_checkpoint]`` asks; numerics equal those without."""
    settings = config.activation_checkpoint
    if settings.mode == "none":
        return
    if settings.mode == "memory_budget":
        # The compiler's partitioner chooses what to keep within the budget.
        torch._functorch.config.activation_memory_budget = settings.memory_budget  # type: ignore[attr-defined]
        torch._functorch.config.visualize_memory_budget_pareto = settings.visualize_memory_budget_pareto  # type: ignore[attr-defined]
        return
    per_operation = is_per_operation(settings)
    every = 1 if settings.mode == "full" or per_operation else int(settings.selective_ac_option)
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": settings.preserve_rng_state,
        "determinism_check": settings.determinism_check,
        "early_stop": settings.early_stop,
        "debug": settings.debug,
    }
    if per_operation:
        shapes = forced_shapes(part, settings.per_op_sac_force_recompute_mm_shapes_by_fqns)
        options["context_fn"] = partial(_contexts, shapes)
        if not settings.debug:
            del options["debug"]
    for number, block in part.layers.items():
        # By its number in the whole model, so that pipeline stages do not change which blocks are chosen.
        if int(number) % every == 0:
            block.forward = _checkpointed(block.forward, options)  # type: ignore[method-assign]


def forced_shapes(part: Decoder, fqns: list[str]) -> frozenset[tuple[int, int]]:
    """Weight shapes, as a matmul sees them, of the linear layers that are always recomputed."""
    return frozenset(
        (module.in_features, module.out_features)
        for name, module in part.named_modules()
        if isinstance(module, torch.nn.Linear) and any(fqn in name for fqn in fqns)
    )


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def _contexts(shapes: frozenset[tuple[int, int]]) -> Any:
    return create_selective_checkpoint_contexts(_policy(shapes))


def _policy(shapes: frozenset[tuple[int, int]]) -> Callable[..., CheckpointPolicy]:
    """Keep what is expensive, but of the matmuls every other one.

    Forward and recomputation count apart: one shared count would alternate between the two where a block has an odd
    number of matmuls, and then recompute what was kept.
    """
    counts: dict[str, int] = defaultdict(int)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in MATMULS:
            if len(args) > 1 and tuple(args[1].shape) in shapes:
                return CheckpointPolicy.PREFER_RECOMPUTE
            phase = "recompute" if context.is_recompute else "forward"
            counts[phase] += 1
            if counts[phase] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
