"""The numbers that fix a decoder's shape, and where a config's come from. Imports no torch: the plan reads them too."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from titanlite.models.flavors import FLAVORS

if TYPE_CHECKING:
    from titanlite.config.schema import Model


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary frequencies for contexts longer than the first training's."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class DecoderSizes:
    """Widths and counts of a decoder; names are those of ``[model]``."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    init_std: float = 0.02

    @property
    def parameters(self) -> int:
        """Number of parameters of the Llama decoder of these sizes, tied weights counted once."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        tables = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.n_layers * block + tables + self.dim

    def with_layers(self, n_layers: int) -> DecoderSizes:
        """The same decoder with another depth."""
        return replace(self, n_layers=n_layers)


def sizes_of(model: Model) -> DecoderSizes:
    """The flavor's sizes with what ``[model]`` overrides; a changed ``dim`` or head count rescales what it implies.

    >>> sizes_of(from_dict({"model": {"n_layers": 2}}).model).n_layers
    2
    """
    flavor: dict[str, Any] = FLAVORS[model.name][model.flavor]
    given = {f.name: getattr(model, f.name) for f in fields(DecoderSizes) if getattr(model, f.name, None) is not None}
    values: dict[str, Any] = {f.name: flavor[f.name] for f in fields(DecoderSizes) if flavor.get(f.name) is not None}
    values |= given
    if "dim" in given or "n_heads" in given:
        values["head_dim"] = given.get("head_dim", values["dim"] // values["n_heads"])
    if "n_heads" in given and "n_kv_heads" not in given and flavor["n_heads"] == flavor["n_kv_heads"]:
        values["n_kv_heads"] = values["n_heads"]
    if "dim" in given and "ffn_dim" not in given:
        values["ffn_dim"] = round(flavor["ffn_dim"] * values["dim"] / flavor["dim"])
    scaling = values.get("rope_scaling")
    if scaling is not None:
        values["rope_scaling"] = RopeScaling(**(scaling if isinstance(scaling, dict) else scaling.model_dump()))
    return DecoderSizes(**values)
