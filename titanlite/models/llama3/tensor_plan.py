"""How tensor parallelism cuts a Llama block: the style of each of its modules, by name within the block.

``titanlite/parallel/tensor.py`` says what the styles do. Modules without parameters that are not named here run as they
are, on this rank's share of the heads or of the feed-forward's width.
"""

from __future__ import annotations


def block_plan() -> dict[str, str]:
    """Styles of a block: norms and residuals on a share of the sequence, matrices on a share of their width."""
    return {
        "attention_norm": "sequence",
        "attention": "gather_sequence",
        "attention.wq": "columns",
        "attention.wk": "columns",
        "attention.wv": "columns",
        "attention.wo": "rows",
        "ffn_norm": "sequence",
        "feed_forward": "gather_sequence",
        "feed_forward.w1": "columns",
        "feed_forward.w3": "columns",
        "feed_forward.w2": "rows",
    }
