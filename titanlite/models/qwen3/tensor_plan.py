"""How tensor parallelism cuts a Qwen3 block: as Llama's, and the norms of queries and keys work on this rank's heads."""

from __future__ import annotations

from titanlite.models.llama3 import tensor_plan as llama3


def block_plan() -> dict[str, str]:
    """Styles of a block's modules by name; ``titanlite/parallel/tensor.py`` says what they do."""
    return llama3.block_plan() | {"attention.q_norm": "heads", "attention.k_norm": "heads"}
