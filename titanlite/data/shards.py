"""Token shards: corpora tokenized before training, memory-mapped.

A folder holds ``manifest.json`` and, for each shard, two files of little-endian numbers without headers::

    00000.bin    tokens of all documents end to end, uint16 where the vocabulary allows, else uint32
    00000.idx    int64, where each document ends

The manifest has "format", "dtype", "vocab_size", "tokenizer" (a fingerprint) and "shards", each with "name", "tokens",
"documents" and "crc32" of the tokens.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import UserError

FORMAT = 1


class ShardSource:
    """Documents of a folder of token shards."""

    def __init__(self, path: str, tokenizer: Tokenizer):
        folder = Path(path)
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} is no folder of token shards: {error}") from None
        if manifest.get("format") != FORMAT:
            raise UserError(f"{folder}: the format of its shards is {manifest.get('format')}, not {FORMAT}")
        if manifest["tokenizer"] != tokenizer.fingerprint:
            raise UserError(
                f"{folder} was tokenized by another tokenizer ({manifest['tokenizer']}) than model.hf_assets_path names "
                f"({tokenizer.fingerprint})"
            )
        self.fingerprint = f"{zlib.crc32(json.dumps(manifest['shards']).encode()):08x}"
        self.tokens: list[np.ndarray] = []
        self.borders: list[np.ndarray] = []
        for shard in manifest["shards"]:
            file = folder / f"{shard['name']}.bin"
            try:
                tokens = (
                    # A plain array over the map: slices of np.memmap itself cost microseconds each.
                    np.asarray(np.memmap(file, dtype=np.dtype(manifest["dtype"]), mode="r"))
                    if shard["tokens"]
                    else np.zeros(0, np.uint16)
                )
                borders = np.fromfile(folder / f"{shard['name']}.idx", dtype="<i8")
            except (OSError, ValueError) as error:
                raise UserError(f"{file} cannot be read: {error}") from None
            if len(tokens) != shard["tokens"] or len(borders) != shard["documents"]:
                raise UserError(
                    f"{file} has not the {shard['tokens']} tokens that the manifest lists: it was cut or changed"
                )
            self.tokens.append(tokens)
            self.borders.append(np.concatenate([[0], borders]))
        self._ends = list(accumulate(len(borders) - 1 for borders in self.borders)) or [0]

    def __len__(self) -> int:
        return self._ends[-1]

    def document(self, index: int) -> np.ndarray:
        """The tokens of a document, specials included: a view of the file, in its type."""
        shard = bisect_right(self._ends, index)
        inside = index - (self._ends[shard - 1] if shard else 0)
        borders = self.borders[shard]
        return self.tokens[shard][borders[inside] : borders[inside + 1]]


def token_dtype(vocab_size: int) -> str:
    """The type that tokens of a vocabulary are stored in."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def write_shard(folder: Path, name: str, documents: Iterable[np.ndarray], dtype: str) -> dict[str, Any]:
    """Write one shard; returns its entry for the manifest. The names appear when the files are whole."""
    ends: list[int] = []
    count = checksum = 0
    staged = folder / f"{name}.bin.tmp"
    with staged.open("wb") as file:
        for tokens in documents:
            raw = tokens.astype(dtype).tobytes()
            file.write(raw)
            checksum = zlib.crc32(raw, checksum)
            count += len(tokens)
            ends.append(count)
    np.array(ends, dtype="<i8").tofile(folder / f"{name}.idx")
    staged.replace(folder / f"{name}.bin")
    return {"name": name, "tokens": count, "documents": len(ends), "crc32": checksum}


def write_manifest(folder: Path, tokenizer: Tokenizer, shards: list[dict[str, Any]]) -> None:
    """Write the manifest, last."""
    values = {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "shards": shards,
    }
    staged = folder / "manifest.json.tmp"
    staged.write_text(json.dumps(values, indent=1))
    staged.replace(folder / "manifest.json")
