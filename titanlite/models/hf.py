"""Names and config of the Hugging Face format. Rotation is half-split on both sides, so weights move by name alone."""

from __future__ import annotations

import re
from typing import Any

from titanlite.models.sizes import DecoderSizes, RopeScaling

TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
ARCHITECTURES = {"llama3": ("llama", "LlamaForCausalLM"), "qwen3": ("qwen3", "Qwen3ForCausalLM")}


def hf_name(name: str) -> str:
    """The Hugging Face name of a parameter.

    >>> hf_name("layers.3.attention.wq.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in TOP:
        return TOP[name]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.weight", name)
    if match is None or match[2] not in BLOCK:
        raise KeyError(name)
    return f"model.layers.{match[1]}.{BLOCK[match[2]]}.weight"


def own_name(name: str) -> str:
    """The parameter of a Hugging Face name.

    >>> own_name("model.layers.3.mlp.up_proj.weight")
    'layers.3.feed_forward.w3.weight'
    """
    for ours, theirs in TOP.items():
        if name == theirs:
            return ours
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    ours_of = {theirs: ours for ours, theirs in BLOCK.items()}
    if match is None or match[2] not in ours_of:
        raise KeyError(name)
    return f"layers.{match[1]}.{ours_of[match[2]]}.weight"


def hf_config(
    family: str, sizes: DecoderSizes, dtype: str, max_positions: int, bos: int | None, eos: int
) -> dict[str, Any]:
    """``config.json`` of a model."""
    kind, architecture = ARCHITECTURES[family]
    scaling = sizes.rope_scaling
    return {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": sizes.dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.ffn_dim,
        "vocab_size": sizes.vocab_size,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": sizes.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }


def sizes_from_hf(config: dict[str, Any]) -> DecoderSizes:
    """The sizes that a ``config.json`` describes, in the older and the newer spelling of its rotary fields."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled = rope.get("rope_type", rope.get("type", "default")) == "llama3"
    heads = config["num_attention_heads"]
    return DecoderSizes(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10_000.0),
        rope_scaling=RopeScaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
        if scaled
        else None,
        tie_embeddings=config.get("tie_word_embeddings", False),
    )
