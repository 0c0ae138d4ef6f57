"""Tensors of a snapshot to and from a folder through ``torch.distributed.checkpoint``, under one flat namespace.

"model.<parameter>" and "optimizer.<parameter>.<key>": pipeline stages and tensor-parallel ranks hold parts of the same
names, so what one layout wrote any other reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlite.errors import UserError

MODEL, OPTIMIZER = "model.", "optimizer."


def write(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this rank's pieces and, on rank 0, DCP's index; each file is on disk when this returns."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    dcp.save(tensors, storage_writer=writer, process_group=group)


def read(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill ``tensors`` in place; their names were compared with the index before."""
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), process_group=group)


def index(folder: Path) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of each stored tensor.

    DCP's index is a pickle. It is opened only in folders that the user named or this run wrote, after its checksum was
    compared with the manifest.
    """
    metadata: Metadata = dcp.FileSystemReader(folder).read_metadata()
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def compare(folder: Path, wanted: dict[str, tuple[tuple[int, ...], Any]], parts: tuple[str, ...]) -> None:
    """Compare the names, shapes and types that all ranks together want with those stored, within ``parts``.

    DCP itself ignores names that nobody asks for and casts types in silence.

    Raises:
        UserError: naming the first difference.
    """
    stored = {name: entry for name, entry in index(folder).items() if name.startswith(parts)}
    for name in sorted(wanted.keys() - stored.keys()):
        raise UserError(f"checkpoint {folder} has no {name}")
    for name in sorted(stored.keys() - wanted.keys()):
        raise UserError(f"checkpoint {folder} has {name}, which this run does not")
    for name, (shape, dtype) in sorted(wanted.items()):
        if stored[name][0] != shape:
            raise UserError(f"checkpoint {folder}: {name} is {stored[name][0]}, this run's is {shape}")
        if stored[name][1] != dtype:
            raise UserError(f"checkpoint {folder}: {name} is {stored[name][1]}, this run's is {dtype}")


def write_json(file: Path, values: Any) -> None:
    """Write JSON, and wait until it is on disk."""
    import os

    with open(file, "w", encoding="utf-8") as stream:
        json.dump(values, stream)
        stream.flush()
        os.fsync(stream.fileno())
