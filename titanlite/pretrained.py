"""A trained decoder with its tokenizer, from a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint import choice, hf, store
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Manifest
from titanlite.config import Config, from_dict
from titanlite.data.tokenizer import Tokenizer, build_tokenizer
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.world import World
from titanlite.errors import UserError
from titanlite.models import hf as names
from titanlite.models.decoder import Decoder
from titanlite.models.registry import family
from titanlite.models.sizes import sizes_of


def load(folder: Path, world: World, tokenizer: str | None = None) -> tuple[Decoder, Tokenizer]:
    """The model of ``folder``, cut by tensor parallelism over all ranks of ``world``, and its tokenizer.

    Args:
        folder: a checkpoint step-N, a folder of them (the newest intact one is taken), or a Hugging Face folder.
        tokenizer: as ``model.hf_assets_path``; default: what the run had, or the Hugging Face folder's own.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder")
    if (folder / "config.json").is_file():
        config = config_of_hf(folder, world.size)
        model = _built(config, world)
        hf.load_weights(folder, dict(model.named_parameters()), config)
        return model, build_tokenizer(tokenizer or str(folder))
    path, manifest = _chosen(folder)
    model_table = manifest.config["model"] | {"converters": []}
    config = _config(model_table, world.size)
    model = _built(config, world)
    tensors = {store.MODEL + name: parameter.detach() for name, parameter in model.named_parameters()}
    store.read(path, tensors, None)
    return model, build_tokenizer(tokenizer or model_table["hf_assets_path"])


def config_of_hf(folder: Path, world_size: int = 1) -> Config:
    """The config whose model is that of a Hugging Face folder."""
    described = hf.read_config(folder)
    kinds = {kind: name for name, (kind, _) in names.ARCHITECTURES.items()}
    name = kinds.get(described.get("model_type", ""))
    if name is None:
        raise UserError(
            f"{folder}: models of type {described.get('model_type')!r} are not known, but {', '.join(kinds)}"
        )
    sizes = asdict(names.sizes_from_hf(described))
    del sizes["init_std"]
    return _config({"name": name, **{key: value for key, value in sizes.items() if value is not None}}, world_size)


def _config(model: dict[str, Any], world_size: int) -> Config:
    parallel = {"tensor_parallel_degree": world_size}
    # The tokenizer may lie elsewhere on this machine than where the model was trained.
    model = {key: value for key, value in model.items() if key != "hf_assets_path"}
    return from_dict({"model": model, "parallelism": parallel, "training": {"seq_len": 2 * world_size}}, world_size)


def _chosen(folder: Path) -> tuple[Path, Manifest]:
    if (folder / manifests.MANIFEST).is_file():
        return choice.one(folder, _check)
    for path in choice.candidates(folder):
        try:
            return choice.one(path, _check)
        except UserError as error:
            print(f"{error}; passed over")
    raise UserError(f"{folder} has no intact checkpoint and no config.json")


def _check(path: Path, manifest: Manifest) -> str:
    try:
        manifests.check(path, manifest, "checksum")
    except manifests.Damaged as damage:
        return str(damage)
    return ""


def _built(config: Config, world: World) -> Decoder:
    with torch.device("meta"):
        model = family(config.model.name).build(sizes_of(config.model))
    mesh = Mesh.build(config, world)
    if mesh.tp > 1:
        from titanlite.parallel import tensor

        tensor.apply(model, config, mesh)
    model.to_empty(device=world.device)
    model.tie()
    return model
