"""Text to token numbers and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """What the loader needs of a tokenizer.

    Attributes:
        fingerprint: changes whenever some text would be encoded otherwise.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Token numbers of ``text``, without specials; special tokens written in the text are text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token numbers."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8, and specials after them; needs no files."""

    vocab_size = 320
    bos_id = 256
    eos_id = 257
    pad_id = 258
    fingerprint = "bytes-320"

    def encode(self, text: str) -> np.ndarray:
        """The bytes of ``text``."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens that are bytes."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


def build_tokenizer(hf_assets_path: str) -> Tokenizer:
    """The tokenizer of ``model.hf_assets_path``."""
    return ByteTokenizer()
