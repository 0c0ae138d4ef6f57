"""A checkpoint's weights to a Hugging Face folder and back, with a few tensors in memory at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.checkpoint import choice, hf, store
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Manifest
from titanlite.config import from_dict
from titanlite.errors import UserError
from titanlite.models import hf as names


def convert(source: Path, target: Path, dtype: str | None = None) -> str:
    """Convert whichever way ``source`` asks for; returns what was done, in words.

    Raises:
        UserError: ``source`` is neither, is damaged, or ``target`` exists.
    """
    if target.exists():
        raise UserError(f"{target} exists already; name a new folder")
    if (source / "config.json").is_file():
        return _from_hf(source, target, dtype)
    if not source.is_dir():
        raise UserError(f"{source} is no folder")
    if not (source / manifests.MANIFEST).is_file() and (steps := list(choice.candidates(source))):
        raise UserError(f"{source} holds several checkpoints; name one, such as {steps[0]}")
    path, manifest = choice.one(source, _check)
    config = from_dict(
        {"model": _given(manifest.config["model"]), "training": {"seq_len": manifest.config["training"]["seq_len"]}}
    )
    hf.export(path, target, config, dtype or "float32")
    return f"{path}: weights of step {manifest.step} written to {target}"


def _given(model: dict[str, Any]) -> dict[str, Any]:
    # The tokenizer's files may not be on this machine; the config of the model does not need them.
    return {name: value for name, value in model.items() if name not in ("converters",)} | {"converters": []}


def _check(path: Path, manifest: Manifest) -> str:
    try:
        manifests.check(path, manifest, "checksum")
    except manifests.Damaged as damage:
        return str(damage)
    return ""


def _from_hf(source: Path, target: Path, dtype: str | None) -> str:
    """Write a checkpoint that holds weights alone, one DCP file a tensor."""
    sizes = names.sizes_from_hf(hf.read_config(source))
    staged = target.with_name(target.name + ".tmp")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    tensors = dict(_weights(source, dtype))
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(staged, sync_files=True), no_dist=True)
    files = {file.name: [file.stat().st_size, manifests.crc32(file)] for file in staged.iterdir()}
    identity = {f"model.{name}": str(value) for name, value in asdict(sizes).items() if name != "init_std"}
    Manifest(0, files, {}, identity, {}, model_only=True, torch=torch.__version__).write(staged)
    os.replace(staged, target)
    return f"{source}: weights written to {target}"


def _weights(source: Path, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Tensors by their name in the store; mapped from the files, so that they are read when they are written."""
    with hf.opened(source) as read:
        for name in read.names():
            tensor = read(name)
            yield store.MODEL + names.own_name(name), tensor if dtype is None else tensor.to(hf.DTYPES[dtype])
