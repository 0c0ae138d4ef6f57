"""Where documents come from."""

from __future__ import annotations

import glob
import hashlib
import json
import sys
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import Protocol

from titanlite.errors import UserError


class Source(Protocol):
    """Documents by number."""

    fingerprint: str

    def __len__(self) -> int: ...

    def document(self, index: int) -> str:
        """The text of a document."""
        ...


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
        return f"embedded python {sys.version.split()[0]}"

    def __len__(self) -> int:
        return len(self._topics) + len(self._files)

    def document(self, index: int) -> str:
        """A topic, or a module's source."""
        topics = self._topics
        if index < len(topics):
            return topics[index]
        return self._files[index - len(topics)].read_text(encoding="utf-8", errors="replace")


class TextSource:
    """Text files; each is a document."""

    def __init__(self, path: str):
        self.files = _files(path, "*.txt")
        self.fingerprint = _fingerprint(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def document(self, index: int) -> str:
        """The text of a file."""
        return self.files[index].read_text(encoding="utf-8")


class JsonlSource:
    """Lines of JSON with a text field."""

    def __init__(self, path: str, text_key: str = "text"):
        self.files = _files(path, "*.json*")
        self.text_key = text_key
        self.fingerprint = _fingerprint(self.files)
        self.lines: list[tuple[Path, int]] = []
        for file in self.files:
            offset = 0
            with file.open("rb") as lines:
                for line in lines:
                    if line.strip():
                        self.lines.append((file, offset))
                    offset += len(line)

    def __len__(self) -> int:
        return len(self.lines)

    def document(self, index: int) -> str:
        """The text of a line."""
        file, offset = self.lines[index]
        with file.open("rb") as lines:
            lines.seek(offset)
            return json.loads(lines.readline())[self.text_key]


def _files(path: str, pattern: str) -> list[Path]:
    where = Path(path)
    found = sorted(where.rglob(pattern)) if where.is_dir() else [Path(name) for name in sorted(glob.glob(path))]
    if not found:
        raise UserError(f"{path}: there are no files")
    return found


def _fingerprint(files: list[Path]) -> str:
    told = "\n".join(f"{file.name} {file.stat().st_size}" for file in files)
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def build_source(dataset: str, path: str | None, text_key: str = "text") -> Source:
    """The source of a dataset kind at a path."""
    if dataset == "embedded":
        return EmbeddedSource()
    assert path is not None
    return TextSource(path) if dataset == "text" else JsonlSource(path, text_key)
