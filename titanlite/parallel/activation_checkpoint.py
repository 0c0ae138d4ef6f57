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
from titanlite.optim.gradients import local

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.config.schema import ActivationCheckpoint

MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default})

RECOMPUTED = 0.2
"""Largest share of a block's matmul FLOPs that the policy by operation does again in the backward pass."""

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
    if settings.mode in ("none", "memory_budget"):
        return  # A budget is the compiler's to keep: ``compile.apply`` tells it.
    per_operation = is_per_operation(settings)
    every = 1 if settings.mode == "full" or per_operation else int(settings.selective_ac_option)
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": settings.preserve_rng_state,
        "determinism_check": settings.determinism_check,
        "early_stop": settings.early_stop,
    }
    if settings.debug:
        options["debug"] = True
    for number, block in part.layers.items():
        # By its number in the whole model, so that pipeline stages do not change which blocks are chosen.
        if int(number) % every == 0:
            own = options
            if per_operation:
                found = matmul_shares(block, settings.per_op_sac_force_recompute_mm_shapes_by_fqns)
                own = options | {"context_fn": partial(_contexts, found)}
            block.forward = _checkpointed(block.forward, own)  # type: ignore[method-assign]


Shares = frozenset[tuple[tuple[int, ...], float]]
"""(weight's shape as a matmul sees it, its share of the block's matmul FLOPs; 0 for one that is always recomputed)."""


def matmul_shares(block: torch.nn.Module, always: list[str]) -> Shares:
    """How the FLOPs of a block's linear layers are spread; ``always`` are parts of names that are always recomputed.

    A layer cut by tensor parallelism is found by its whole shape and by its piece's: which of them the policy sees
    depends on whether the block is compiled.
    """
    linears = [(name, m.weight) for name, m in block.named_modules() if isinstance(m, torch.nn.Linear)]
    total = sum(weight.numel() for _, weight in linears)
    found: dict[tuple[int, ...], float] = {}
    for name, weight in linears:
        share = 0.0 if any(fqn in name for fqn in always) else weight.numel() / total
        for tensor in (weight, local(weight)):
            shape = tuple(tensor.shape[::-1])
            found[shape] = min(share, found.get(shape, share))
    return frozenset(found.items())


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def _contexts(shares: Shares) -> Any:
    return create_selective_checkpoint_contexts(_policy(dict(shares)))


def _policy(shares: dict[tuple[int, ...], float]) -> Callable[..., CheckpointPolicy]:
    """Keep what is expensive, but of the matmuls every other one, as long as those stay within ``RECOMPUTED``.

    Alternation alone would recompute one of the feed-forward's three matmuls: with Llama's shapes a third of a block's
    FLOPs. Forward and recomputation count apart: one shared count would alternate between the two where a block has an
    odd number of matmuls, and then recompute what was kept.
    """
    counts: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in MATMULS:
            share = shares.get(tuple(args[1].shape), 1.0)
            phase = "recompute" if context.is_recompute else "forward"
            counts[phase] += share > 0
            if share == 0 or (counts[phase] % 2 == 0 and spent[phase] + share <= RECOMPUTED):
                spent[phase] += share
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
