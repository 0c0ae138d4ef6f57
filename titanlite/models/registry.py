"""The model families by the name that ``model.name`` takes: the only place outside their folders that knows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlite.models.sizes import DecoderSizes

if TYPE_CHECKING:
    from titanlite.models.decoder import Decoder


@dataclass(frozen=True)
class Family:
    """What the rest of the house needs of a model family.

    Attributes:
        build: the decoder of given sizes, in plain PyTorch.
        block_plan: tensor-parallel styles of a block's modules, by name within the block.
    """

    build: Callable[[DecoderSizes], Decoder]
    block_plan: Callable[[], dict[str, Any]]


def family(name: str) -> Family:
    """The family of ``model.name``; config validation knows the names, so another one is a fault of ours."""
    if name == "llama3":
        from titanlite.models import llama3

        return llama3.FAMILY
    if name == "qwen3":
        from titanlite.models import qwen3

        return qwen3.FAMILY
    raise KeyError(name)
