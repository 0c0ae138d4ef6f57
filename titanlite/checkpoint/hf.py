"""Weights from and to Hugging Face folders: ``config.json``, safetensors, and the index of their shards.

Both directions go tensor by tensor: memory holds a few tensors, never the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlite.checkpoint import store
from titanlite.errors import UserError
from titanlite.models import hf
from titanlite.models.sizes import DecoderSizes, sizes_of

if TYPE_CHECKING:
    from titanlite.config import Config

SHARD_BYTES = 5 * 10**9
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def export(source: Path, target: Path, config: Config, dtype: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the weights of the checkpoint ``source`` as safetensors into ``target``, which appears when it is whole."""
    from titanlite.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(config.model.hf_assets_path)
    sizes = sizes_of(config.model)
    described = hf.hf_config(
        config.model.name, sizes, dtype, config.training.seq_len, tokenizer.bos_id, tokenizer.eos_id
    )
    staged = target.with_name(target.name + ".tmp")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    (staged / "config.json").write_text(json.dumps(described, indent=2))
    write_shards(staged, tensors_of(source, DTYPES[dtype]), shard_bytes)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(staged, target)


def tensors_of(checkpoint: Path, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint by Hugging Face name, one at a time."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(checkpoint)
    for name, (shape, kind) in sorted(store.index(checkpoint).items()):
        if name.startswith(store.MODEL):
            tensor = torch.empty(shape, dtype=kind)
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
            yield hf.hf_name(name.removeprefix(store.MODEL)), tensor if dtype is None else tensor.to(dtype)


def write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write safetensors of about ``shard_bytes`` each, and their index where there are several."""
    save_file = _safetensors().torch.save_file
    weight_map: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    written = total = count = 0

    def flush() -> None:
        nonlocal count, written
        if shard:
            count += 1
            save_file(shard, str(folder / f"part-{count}.safetensors"), metadata={"format": "pt"})
            shard.clear()
            written = 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if written + size > shard_bytes:
            flush()
        shard[name] = tensor.contiguous()
        weight_map[name] = count + 1
        written += size
        total += size
    flush()
    names = {
        i: "model.safetensors" if count == 1 else f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
    }
    for i, name in names.items():
        os.replace(folder / f"part-{i}.safetensors", folder / name)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in weight_map.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def load_weights(folder: Path, model: dict[str, Tensor], config: Config) -> None:
    """Fill ``model``'s parameters, sharded or not, from a Hugging Face folder.

    Raises:
        UserError: the folder describes another model, or lacks a tensor.
    """
    compare_sizes(folder, sizes_of(config.model))
    with opened(folder) as read:
        for name, parameter in model.items():
            full = read(hf.hf_name(name)).to(parameter.dtype)
            if tuple(full.shape) != tuple(parameter.shape):
                raise UserError(
                    f"{folder}: {hf.hf_name(name)} is {tuple(full.shape)}, this run's is {tuple(parameter.shape)}"
                )
            with torch.no_grad():
                if isinstance(parameter, DTensor):
                    mesh = parameter.device_mesh
                    piece = distribute_tensor(full.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
                    parameter.to_local().copy_(piece.to_local())
                else:
                    parameter.copy_(full)


def compare_sizes(folder: Path, sizes: DecoderSizes) -> None:
    """Raises UserError naming the first size in which a folder's model differs from this run's."""
    theirs = hf.sizes_from_hf(read_config(folder))
    for field in fields(DecoderSizes):
        mine, other = getattr(sizes, field.name), getattr(theirs, field.name)
        if field.name != "init_std" and mine != other:
            raise UserError(f"{folder}: its model has {field.name} = {other}, this run's has {mine}")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no Hugging Face model: {error}") from None


class opened:
    """A folder of safetensors, read by tensor name."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self.files: dict[str, str] | None = json.loads(index.read_text())["weight_map"]
        elif (folder / "model.safetensors").is_file():
            self.files = None
        else:
            raise UserError(f"{folder} has neither model.safetensors nor an index of shards")
        self.handles: dict[str, Any] = {}

    def __enter__(self) -> opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.handles.clear()

    def names(self) -> list[str]:
        """The tensors that are there."""
        return sorted(self.files) if self.files is not None else sorted(self._handle("model.safetensors").keys())

    def __call__(self, name: str) -> Tensor:
        """A tensor."""
        if name not in self.names():
            raise UserError(f"{self.folder} has no tensor {name}")
        return self._handle(self.files[name] if self.files is not None else "model.safetensors").get_tensor(name)

    def _handle(self, file: str) -> Any:
        if file not in self.handles:
            try:
                self.handles[file] = _safetensors().safe_open(str(self.folder / file), framework="pt")
            except Exception as error:
                raise UserError(f"{self.folder / file} cannot be read: {error}") from error
        return self.handles[file]


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise UserError("Hugging Face folders need the package safetensors: pip install 'titanlite[hf]'") from None
    return safetensors
