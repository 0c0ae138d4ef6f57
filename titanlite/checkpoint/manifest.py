"""The manifest of a checkpoint: what files it has, their sizes and checksums, and what it holds.

A folder without a good manifest does not exist. It is written last, after everything it lists is on disk.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
INDEX = ".metadata"
"""DCP's index, a pickle: its bytes are compared whatever ``verify`` says, before anything opens it."""
CHUNK = 4 * 2**20


@dataclass
class Manifest:
    """What stands in ``manifest.json``.

    Attributes:
        files: by name, [size in bytes, CRC-32].
        identity: what a run must have in common with the checkpoint to load it.
    """

    step: int
    files: dict[str, list[int]]
    train_state: dict[str, Any]
    identity: dict[str, str]
    mesh: dict[str, int]
    model_only: bool = False
    torch: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, and wait until it is on disk."""
        text = json.dumps(asdict(self), indent=1)
        body = json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text})
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)


class Damaged(Exception):
    """A checkpoint is not intact; the message says what is wrong with it."""


def read(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        Damaged: there is none, or it is not as it was written.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise Damaged("it has no manifest: it was not finished")
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        text = body["manifest"]
        if zlib.crc32(text.encode()) != body["crc32"]:
            raise Damaged("its manifest was changed")
        values = json.loads(text)
        if values.get("format") != FORMAT:
            raise Damaged(f"its format is {values.get('format')}, not {FORMAT}")
        return Manifest(**values)
    except (OSError, ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise Damaged(f"its manifest cannot be read: {error}") from None


def check(folder: Path, manifest: Manifest, verify: str, share: int = 0, shares: int = 1) -> None:
    """Compare the files of ``folder`` with the manifest, or the ``share``-th of ``shares`` equal parts of them.

    Raises:
        Damaged: naming the first file that differs.
    """
    for name in sorted(manifest.files)[share::shares]:
        size, checksum = manifest.files[name]
        file = folder / name
        if not file.is_file():
            raise Damaged(f"{name} is missing")
        found = file.stat().st_size
        if found != size:
            raise Damaged(f"{name} has {found} bytes, not {size}")
        if (verify == "checksum" or name == INDEX) and crc32(file) != checksum:
            raise Damaged(f"{name} has other bytes than were written")


def crc32(file: Path) -> int:
    """CRC-32 of a file's bytes: it finds every flip of up to three bits, which is what disks do, at memory speed."""
    value = 0
    with open(file, "rb", buffering=0) as stream:
        while block := stream.read(CHUNK):
            value = zlib.crc32(block, value)
    return value


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
