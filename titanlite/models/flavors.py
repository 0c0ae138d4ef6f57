"""The published sizes of each model family. Pure data: config checks and the plan read it without torch."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "vocab_size": 128_256,
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": None,
    "tie_embeddings": False,
    "head_dim": 128,
    "n_kv_heads": 8,
    "init_std": 0.02,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151_936,
    "norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "tie_embeddings": True,
    "head_dim": 128,
    "n_kv_heads": 8,
    "init_std": 0.02,
}
_DEBUG = {"dim": 256, "n_layers": 6, "n_heads": 16, "n_kv_heads": 16, "head_dim": 16, "ffn_dim": 768, "vocab_size": 320}


def _scaled(factor: float) -> dict[str, float | int]:
    return {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


FLAVORS: dict[str, dict[str, dict[str, Any]]] = {
    "llama3": {
        "debugmodel": _LLAMA | _DEBUG,
        "1B": _LLAMA
        | {"dim": 2048, "n_layers": 16, "n_heads": 32, "head_dim": 64, "ffn_dim": 8192}
        | {"tie_embeddings": True, "rope_scaling": _scaled(32.0)},
        "3B": _LLAMA
        | {"dim": 3072, "n_layers": 28, "n_heads": 24, "ffn_dim": 8192}
        | {"tie_embeddings": True, "rope_scaling": _scaled(32.0)},
        "8B": _LLAMA | {"dim": 4096, "n_layers": 32, "n_heads": 32, "ffn_dim": 14336},
        "70B": _LLAMA | {"dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_dim": 28672},
        "405B": _LLAMA | {"dim": 16384, "n_layers": 126, "n_heads": 128, "ffn_dim": 53248},
    },
    "qwen3": {
        "debugmodel": _QWEN | _DEBUG | {"n_kv_heads": 8},
        "0.6B": _QWEN | {"dim": 1024, "n_layers": 28, "n_heads": 16, "ffn_dim": 3072},
        "1.7B": _QWEN | {"dim": 2048, "n_layers": 28, "n_heads": 16, "ffn_dim": 6144},
        "4B": _QWEN | {"dim": 2560, "n_layers": 36, "n_heads": 32, "ffn_dim": 9728},
        "8B": _QWEN | {"dim": 4096, "n_layers": 36, "n_heads": 32, "ffn_dim": 12288, "tie_embeddings": False},
    },
}
