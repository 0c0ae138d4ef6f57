"""JSON lines, also compressed by gzip or zstandard, read in any order through an index of line offsets."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

from titanlite.data.sources import BadRecord, find_files, fingerprint
from titanlite.errors import UserError

BLOCK = 2**24


class JsonlSource:
    """Lines of JSON; a field of each is a document.

    The index is built once and kept in the cache folder. So are the plain bytes of compressed files: they cannot be
    read from the middle.
    """

    def __init__(self, path: str, text_key: str = "text"):
        found = find_files(path, ("*.jsonl", "*.json", "*.jsonl.gz", "*.json.gz", "*.jsonl.zst", "*.json.zst"))
        self.text_key = text_key
        self.fingerprint = fingerprint(found)
        self.names = found
        self.files = [plain(file) for file in found]
        self.offsets = [line_offsets(file) for file in self.files]
        self.ends = np.cumsum([len(offsets) for offsets in self.offsets])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def document(self, index: int) -> str:
        """The text of a line."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        line = index - (int(self.ends[number - 1]) if number else 0)
        with self.files[number].open("rb") as stream:
            stream.seek(int(self.offsets[number][line]))
            record = stream.readline()
        where = f"{self.names[number]}: record {line + 1}"
        try:
            values = json.loads(record)
        except ValueError as error:
            raise BadRecord(f"{where} is not JSON: {error}") from error
        if not isinstance(values, dict) or not isinstance(values.get(self.text_key), str):
            raise BadRecord(f"{where} has no text in field {self.text_key!r}")
        return values[self.text_key]


def cache_folder() -> Path:
    """Where indices and unpacked files are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlite"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def plain(file: Path) -> Path:
    """The file itself, or where its unpacked bytes are."""
    if file.suffix not in (".gz", ".zst"):
        return file
    target = cache_folder() / f"{_key(file)}.jsonl"
    if not target.exists():
        with _opened(file) as packed, tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as staged:
            try:
                shutil.copyfileobj(packed, staged, BLOCK)
            except Exception as error:
                os.unlink(staged.name)
                raise UserError(f"{file} cannot be unpacked: {error}") from error
        os.replace(staged.name, target)
    return target


def line_offsets(file: Path) -> np.ndarray:
    """Where each line that is not empty begins, int64."""
    target = cache_folder() / f"{_key(file)}.npy"
    try:
        return np.load(target, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        pass
    offsets = _scan(file)
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".npy", delete=False) as staged:
        np.save(staged, offsets)
    os.replace(staged.name, target)
    return offsets


def _scan(file: Path) -> np.ndarray:
    breaks = [np.array([-1], dtype=np.int64)]
    size = file.stat().st_size
    with file.open("rb") as stream:
        at = 0
        while block := stream.read(BLOCK):
            breaks.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10) + at)
            at += len(block)
    begins = np.concatenate(breaks) + 1
    ends = np.append(begins[1:], size)
    # A line of one byte is a line break alone; the last entry is empty where the file ends in one.
    return begins[ends - begins > 1]


def _opened(file: Path):
    if file.suffix == ".gz":
        return gzip.open(file, "rb")
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{file} needs the package zstandard: pip install 'titanlite[data]'") from None
    return zstandard.open(file, "rb")


def _key(file: Path) -> str:
    stat = file.stat()
    told = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()
