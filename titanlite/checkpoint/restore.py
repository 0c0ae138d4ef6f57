"""A checkpoint into this run: verified by all ranks, compared with the run, loaded on whatever layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titanlite.checkpoint import choice, store
from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Damaged, Manifest
from titanlite.checkpoint.snapshot import Restored, Snapshot
from titanlite.errors import UserError

if TYPE_CHECKING:
    from titanlite.checkpoint.manager import CheckpointManager


def verify(manager: CheckpointManager, path: Path, manifest: Manifest) -> str:
    """On rank 0: let every rank check a share of the files; what is wrong with them, or ""."""
    _broadcast(manager, ("verify", path, manifest))
    return _share(manager, path, manifest)


def answered(manager: CheckpointManager, answer: Any) -> Any:
    """On rank 0: tell every rank what was chosen."""
    _broadcast(manager, ("answer", answer, None))
    if isinstance(answer, UserError):
        raise answer
    return answer


def serve(manager: CheckpointManager) -> Any:
    """On the other ranks: check shares until rank 0 has chosen."""
    while True:
        kind, first, second = _broadcast(manager, None)
        if kind == "verify":
            _share(manager, first, second)
            continue
        if isinstance(first, UserError):
            raise first
        return first


def own(manager: CheckpointManager, path: Path, manifest: Manifest, snapshot: Snapshot) -> Restored:
    """Go on from a checkpoint of this run."""
    excluded = manager.settings.exclude_from_loading
    _compare_identity(manager, path, manifest, snapshot, data="dataloader" not in excluded)
    parts = (store.MODEL,) if "optimizer" in excluded or manifest.model_only else (store.MODEL, store.OPTIMIZER)
    _load(manager, path, snapshot, parts)
    return Restored(
        manifest.step,
        {} if "train_state" in excluded or manifest.model_only else manifest.train_state,
        {} if "dataloader" in excluded else _lanes(path),
        f"resumed from {path}, saved on {_layout(manifest)}{_schedule(manager, manifest)}",
    )


def initial(manager: CheckpointManager, snapshot: Snapshot) -> Restored:
    """Start from ``initial_load_path``: weights alone, or everything."""
    settings = manager.settings
    path = Path(settings.initial_load_path or "")
    if settings.initial_load_in_hf:
        from titanlite.checkpoint.hf import load_weights

        load_weights(path, snapshot.model, manager.config)
        return Restored(0, note=f"weights from {path}")
    if (path / manifests.MANIFEST).is_file() or not list(choice.candidates(path)):
        found = manager._decided(lambda check: choice.one(path, check))
    else:
        found = manager._decided(lambda check: choice.newest_intact(path, check))
    path, manifest = found
    weights_only = settings.initial_load_model_only
    _compare_identity(manager, path, manifest, snapshot, data=not weights_only)
    if weights_only:
        _load(manager, path, snapshot, (store.MODEL,))
        return Restored(0, note=f"weights from {path}")
    if manifest.model_only:
        raise UserError(f"checkpoint {path} holds the weights alone; set checkpoint.initial_load_model_only")
    return own(manager, path, manifest, snapshot)


def _share(manager: CheckpointManager, path: Path, manifest: Manifest) -> str:
    wrong = ""
    try:
        manifests.check(path, manifest, manager.settings.verify, manager.world.rank, manager.world.size)
    except Damaged as damage:
        wrong = str(damage)
    except OSError as error:
        wrong = f"it cannot be read: {error}"
    return next((told for told in manager.gather(wrong) if told), "")


def _broadcast(manager: CheckpointManager, message: Any) -> Any:
    if manager.world.size == 1:
        return message
    held = [message]
    dist.broadcast_object_list(held, src=0, group=manager.group)
    return held[0]


def _load(manager: CheckpointManager, path: Path, snapshot: Snapshot, parts: tuple[str, ...]) -> None:
    tensors = snapshot.tensors(optimizer=store.OPTIMIZER in parts)
    mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    wanted = {name: entry for share in manager.gather(mine) for name, entry in share.items()}
    store.compare(path, wanted, parts)
    store.read(path, tensors, manager.group)


def _compare_identity(
    manager: CheckpointManager, path: Path, manifest: Manifest, snapshot: Snapshot, data: bool
) -> None:
    """Name the first difference between the run that saved and this one."""
    forgiven = manager.config.data.allow_change or not data
    for name in sorted(manifest.identity.keys() | snapshot.identity.keys()):
        theirs, mine = manifest.identity.get(name), snapshot.identity.get(name)
        if theirs == mine or (name.startswith("data.") and forgiven):
            continue
        hint = "; data.allow_change = true goes on nevertheless" if name.startswith("data.") else ""
        raise UserError(f"checkpoint {path} was saved with {name} = {theirs}, this run has {mine}{hint}")


def _lanes(path: Path) -> dict[int, Any]:
    lanes: dict[int, Any] = {}
    for file in path.glob("lanes-*.json"):
        lanes |= {int(lane): state for lane, state in json.loads(file.read_text(encoding="utf-8")).items()}
    return lanes


def _layout(manifest: Manifest) -> str:
    return " x ".join(f"{name} {size}" for name, size in manifest.mesh.items() if size > 1) or "one process"


def _schedule(manager: CheckpointManager, manifest: Manifest) -> str:
    """A word where the learning-rate schedule is another one than the run so far had."""
    from titanlite.optim.schedule import schedule_length

    before, now = manifest.train_state.get("schedule_length"), schedule_length(manager.config)
    if before in (None, now):
        return ""
    return (
        f"; the learning-rate schedule spans {now} steps now, not {before}: the rate of coming steps is not that of a "
        "run of this length from the start (lr_scheduler.total_steps fixes it)"
    )
