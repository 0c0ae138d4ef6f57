"""Every use of torch's private API by tensor and context parallelism, one function each, with the reason.

Checked against torch 2.11 to 2.14; ``tests/distributed/test_private_tensor.py`` fails when one of them goes away.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def overlap_tensor_parallel_collectives(group: dist.ProcessGroup) -> None:
    """Let the compiler overlap tensor parallelism's collectives with matrix products: a private inductor option."""
    import torch._inductor.config

    torch._inductor.config._micro_pipeline_tp = True


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of that name: operations that the compiler sees take strings, not groups."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(name)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, tuple]:
    """Attention of q [b, h, s, d] over k and v [b, kv_heads, t, d] by the device's own fused kernel.

    Returns the result, the log-sum-exp of each query's scores [b, h, s] (fp32), and what else ``flash_backward`` needs.
    ``scaled_dot_product_attention`` does not give the log-sum-exp, without which results over pieces cannot be merged.
    """
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse, ()
    if q.dtype == torch.float32:  # CUDA's flash kernel takes half precision only
        k, v = _for_each_head(k, q), _for_each_head(v, q)
        out, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal
        )
        # That kernel pads the log-sum-exp to a multiple of 32 queries.
        return out, lse[:, :, : q.shape[2]], (lse, seed, offset)
    made = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return made[0], made[1], tuple(made[2:8])


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, rest: tuple
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``flash_forward``'s q, k and v; ``out`` and ``lse`` may be those of a merge over several pieces."""
    if q.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(grad, q, k, v, out, lse, 0.0, causal)
    if q.dtype == torch.float32:
        heads = k.shape[1]
        k, v = _for_each_head(k, q), _for_each_head(v, q)
        padded, seed, offset = rest
        merged = torch.full_like(padded, torch.inf)
        merged[:, :, : q.shape[2]] = lse
        op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dv, _ = op(grad, q, k, v, None, out, merged, seed, offset, 0.0, [True, True, True, False], causal)
        return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)
    q_ends, k_ends, q_most, k_most, seed, offset = rest
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return op(grad, q, k, v, out, lse, q_ends, k_ends, q_most, k_most, 0.0, causal, seed, offset)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)
