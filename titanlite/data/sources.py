"""Where documents come from: everything is a number of documents that can be read in any order."""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from titanlite.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from titanlite.data.tokenizer import Tokenizer


class Source(Protocol):
    """Documents by number.

    Attributes:
        fingerprint: changes when the documents may have changed.
    """

    @property
    def fingerprint(self) -> str:
        """See the class."""
        ...

    def __len__(self) -> int: ...

    def document(self, index: int) -> str | np.ndarray:
        """The text of a document, or its tokens where the source is tokenized already.

        Raises:
            BadRecord: it cannot be read.
        """
        ...


class BadRecord(Exception):
    """A record that cannot be read; the message names file and place."""


class EmbeddedSource:
    """Text that ships with Python: the pydoc topics and the standard library's own source, in a fixed order."""

    @cached_property
    def _files(self) -> list[Path]:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(path for path in root.glob("*.py") if path.stat().st_size > 500)

    @cached_property
    def _topics(self) -> list[str]:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]

    @property
    def fingerprint(self) -> str:
        """The interpreter's version: the text is its own."""
        return f"python {sys.version.split()[0]}"

    def __len__(self) -> int:
        return len(self._topics) + len(self._files)

    def document(self, index: int) -> str:
        """A topic, or a module's source."""
        topics = self._topics
        if index < len(topics):
            return topics[index]
        return self._files[index - len(topics)].read_text(encoding="utf-8", errors="replace")


class TextSource:
    """Text files in UTF-8; each is a document."""

    def __init__(self, path: str):
        self.files = find_files(path, ("*.txt", "*.md", "*.py", "*.rst"))
        self.fingerprint = fingerprint(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def document(self, index: int) -> str:
        """The text of a file."""
        try:
            return self.files[index].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRecord(f"{self.files[index]}: {error}") from error


def build_source(dataset: str, path: str | None, tokenizer: Tokenizer, text_key: str = "text") -> Source:
    """The source of a kind of dataset at a path.

    Raises:
        UserError: there is nothing there, or a package that reads it is missing.
    """
    source = _source(dataset, path, tokenizer, text_key)
    if len(source) == 0:
        raise UserError(f"dataset {dataset} at {path} has no documents")
    return source


def _source(dataset: str, path: str | None, tokenizer: Tokenizer, text_key: str) -> Source:
    if dataset == "embedded":
        return EmbeddedSource()
    if path is None:
        raise UserError(f"dataset {dataset} needs a path")
    if dataset == "text":
        return TextSource(path)
    # Imported when used: each brings a package of its own.
    if dataset in ("jsonl", "c4", "c4_test", "c4_validation"):
        from titanlite.data.jsonl import JsonlSource

        return JsonlSource(path, text_key)
    if dataset == "parquet":
        from titanlite.data.parquet import ParquetSource

        return ParquetSource(path, text_key)
    if dataset == "tokens":
        from titanlite.data.shards import ShardSource

        return ShardSource(path, tokenizer)
    from titanlite.data.hub import HubSource

    return HubSource(path, text_key)


def find_files(path: str, patterns: tuple[str, ...]) -> list[Path]:
    """The files of a folder by ``patterns``, of a glob, or the one file, in a fixed order."""
    where = Path(path)
    if where.is_dir():
        found = sorted({file for pattern in patterns for file in where.rglob(pattern) if file.is_file()})
    else:
        found = [Path(name) for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
    if not found:
        raise UserError(f"{path}: there is no file" + (f" like {' or '.join(patterns)}" if where.is_dir() else ""))
    return found


def fingerprint(files: list[Path]) -> str:
    """A digest of names, sizes and first and last bytes: reading a corpus whole at each start would take hours."""
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(4096)
            stream.seek(max(0, size - 4096))
            digest.update(f"{file.name} {size} ".encode() + head + stream.read())
    return digest.hexdigest()
