"""One save, from tensors in memory to a published checkpoint; runs on the training thread or beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import store
from titanlite.checkpoint.manifest import Manifest, crc32
from titanlite.checkpoint.publish import LeaseLost
from titanlite.checkpoint.snapshot import Snapshot, first_not_finite, local

if TYPE_CHECKING:
    from titanlite.checkpoint.manager import CheckpointManager

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

FULL = 2**20
"""Bytes below which a disk counts as full."""


class SaveFailed(Exception):
    """A save failed on some rank; every rank raises the same message, and nothing was published."""


class Save:
    """A save of one step.

    Every phase ends with the ranks telling each other whether it went well, so that one rank's full disk neither leaves
    the others waiting nor publishes a checkpoint without its files.
    """

    def __init__(self, manager: CheckpointManager, step: int, snapshot: Snapshot, model_only: bool):
        self.manager, self.step, self.model_only = manager, step, model_only
        self.lanes = json.loads(json.dumps(snapshot.lanes))
        self.train_state, self.identity = dict(snapshot.train_state), dict(snapshot.identity)
        self.folder = manager.shelf.staged(step)

    def run(self, tensors: dict[str, Tensor]) -> None:
        """Write, verify, publish, and delete what is no longer kept.

        Raises:
            SaveFailed: on every rank, where any phase failed on any.
            LeaseLost: another run writes to the folder.
        """
        self.folder = Path(self.manager.gather(str(self.folder))[0])
        self._phase(self._prepare, tensors)
        files = self._phase(self._write, tensors)
        self._phase(self._publish, {name: told for share in files for name, told in share.items()})

    def _phase(self, act: Any, argument: Any) -> list[Any]:
        told: tuple[str, Any]
        try:
            told = "", act(argument)
        except LeaseLost as error:
            told = "lease", str(error)
        except (Exception, CheckpointException) as error:
            told = "error", _words(error, self.folder)
        answers = self.manager.gather(told)
        for rank, (kind, value) in enumerate(answers):
            if kind == "lease":
                raise LeaseLost(value)
            if kind:
                if self.manager.world.rank == 0:
                    self.manager.shelf.discard(self.step)
                raise SaveFailed(f"the checkpoint of step {self.step} could not be saved: rank {rank}: {value}")
        return [value for _, value in answers]

    def _prepare(self, tensors: dict[str, Tensor]) -> None:
        name = first_not_finite(tensors)
        if name:
            raise ValueError(f"{name} is not finite, and must not push a good checkpoint out")
        if self.manager.world.rank == 0:
            self.manager.shelf.require_lease()
            self.manager.shelf.discard(self.step)
            self.folder.mkdir(parents=True)

    def _write(self, tensors: dict[str, Tensor]) -> dict[str, list[int]]:
        """Size and checksum of the files that this rank wrote."""
        rank = self.manager.world.rank
        if self.lanes:
            store.write_json(self.folder / f"lanes-{rank}.json", self.lanes)
        store.write(self.folder, tensors, self.manager.group)
        mine = [*self.folder.glob(f"__{rank}_*"), *self.folder.glob(f"lanes-{rank}.json")]
        if rank == 0:
            mine.append(self.folder / ".metadata")
        return {file.name: [file.stat().st_size, crc32(file)] for file in mine}

    def _publish(self, files: dict[str, list[int]]) -> None:
        manager = self.manager
        if manager.world.rank > 0:
            return
        config = manager.config.model_dump(mode="json")
        manifest = Manifest(
            self.step, files, self.train_state, self.identity, manager.mesh, self.model_only, torch.__version__, config
        )
        manager.shelf.publish(self.step, manifest)
        manager.shelf.retain(self.step, manager.settings.keep_latest_k, manager.settings.keep_every)


def exported(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Copies of floating-point tensors in another type; the live ones stay as they are."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(DTYPES[dtype]) if local(tensor).is_floating_point() else tensor

    return {name: cast(tensor) if isinstance(tensor, DTensor | Tensor) else tensor for name, tensor in tensors.items()}


def _words(error: BaseException, folder: Path) -> str:
    """The reason on one line; DCP wraps it in a report of several, and torch's writer hides that the disk is full."""
    reasons = [failure[0] for failure in getattr(error, "failures", {}).values()] or [error]
    text = "; ".join(dict.fromkeys(" ".join(str(reason).split()) or type(reason).__name__ for reason in reasons))
    exists = next(place for place in (folder, *folder.parents) if place.exists())
    full = "No space left" not in text and shutil.disk_usage(exists).free < FULL
    return f"No space left on device for {folder} ({text})" if full else text
