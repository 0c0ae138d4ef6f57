"""Every use of torch's private compiler API, one function each, with the reason.

Checked against torch 2.11 to 2.14; ``tests/distributed/test_private_compile.py`` fails when one of them goes away.
"""

from __future__ import annotations


def set_activation_budget(share: float, picture: bool) -> None:
    """The share of activations that the partitioner may keep, 1 being all: only the private config has it."""
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = share
    functorch.visualize_memory_budget_pareto = picture


def has_triton() -> bool:
    """Whether inductor finds a triton that can serve this GPU: only torch itself knows which versions can."""
    from torch.utils._triton import has_triton

    return has_triton()
