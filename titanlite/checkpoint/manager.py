"""When state is saved, where, and what a run resumes from."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Damaged, Manifest
from titanlite.errors import TrainingStopped, UserError

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.world import World

STEP = re.compile(r"step-(\d+)$")


@dataclass
class Snapshot:
    """This rank's live state, for saving or to be filled.

    Attributes:
        model: parameters by fully qualified name.
        optimizer: optimizer state by "name.key".
        lanes: loader state of this rank's rows; empty on ranks whose rows another rank reports.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    train_state: dict[str, Any]
    lanes: dict[int, Any]
    identity: dict[str, str]


@dataclass
class Restored:
    """What a checkpoint held beside tensors."""

    step: int
    train_state: dict[str, Any] = field(default_factory=dict)
    lanes: dict[int, Any] = field(default_factory=dict)
    note: str = ""


class CheckpointManager:
    """Saves at the interval, publishes whole checkpoints only, and finds the newest intact one."""

    def __init__(self, config: Config, world: World, mesh: dict[str, int], folder: Path):
        self.config, self.settings, self.world, self.mesh = config, config.checkpoint, world, mesh
        self.folder = folder / self.settings.folder
        # Collectives of a save run beside those of training, so they need a group of their own.
        self.group = dist.new_group(backend="gloo") if self.settings.enable else None
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.saved = -1
        if self.settings.enable and world.rank == 0:
            for left in self.folder.glob("step-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)

    def due(self, step: int) -> bool:
        """Whether ``step`` is saved."""
        if not self.settings.enable or self.settings.load_only or step == 0:
            return False
        return step % self.settings.interval == 0 or (step == 1 and self.settings.enable_first_step_checkpoint)

    def save(self, step: int, make_snapshot: Callable[[], Snapshot], last: bool = False) -> float:
        """Save ``step``; returns the seconds that training waited."""
        if not self.settings.enable or self.settings.load_only or step == self.saved:
            return 0.0
        began = time.perf_counter()
        self.wait()
        self.saved = step
        snapshot = make_snapshot()
        if self.settings.async_mode == "disabled":
            self._write(step, snapshot)
        else:
            staged = _copied(snapshot)
            self.thread = threading.Thread(target=self._write, args=(step, staged), name="checkpoint")
            self.thread.start()
        self.poll()
        return time.perf_counter() - began

    def poll(self) -> None:
        """Tell an error of the save before."""
        error, self.error = self.error, None
        if error is not None:
            raise TrainingStopped(f"the checkpoint could not be saved: {error}") from error

    def wait(self) -> None:
        """Wait until the save in flight is published."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.poll()

    def restore(self, snapshot: Snapshot) -> Restored | None:
        """Fill ``snapshot`` from the newest intact checkpoint; None where there is none."""
        if not self.settings.enable:
            return None
        chosen = self._choose()
        if chosen is None:
            return None
        path, manifest = chosen
        for name, value in manifest.identity.items():
            mine = snapshot.identity.get(name)
            if mine != value and not (name.startswith("data.") and self.config.data.allow_change):
                raise UserError(f"{path} was saved with {name} = {value}, this run has {mine}")
        import torch.distributed.checkpoint as dcp

        dcp.load(_flat(snapshot), checkpoint_id=path, process_group=self.group)
        lanes: dict[int, Any] = {}
        for file in path.glob("lanes-*.json"):
            lanes |= {int(lane): state for lane, state in _read_json(file).items()}
        return Restored(manifest.step, manifest.train_state, lanes, f"resumed from {path}")

    def newest(self) -> str | None:
        """The checkpoint that was saved last, as text."""
        return str(self.folder / f"step-{self.saved}") if self.saved >= 0 else None

    def close(self) -> None:
        """Wait for the save in flight."""
        if self.thread is not None:
            self.thread.join()

    def _choose(self) -> tuple[Path, Manifest] | None:
        answer: list[Any] = [None]
        if self.world.rank == 0:
            answer = [self._newest_intact()]
        if self.world.size > 1:
            dist.broadcast_object_list(answer, src=0, group=self.group)
        if isinstance(answer[0], UserError):
            raise answer[0]
        return answer[0]

    def _newest_intact(self) -> tuple[Path, Manifest] | UserError | None:
        found = [(int(m[1]), p) for p in self.folder.glob("step-*") if (m := STEP.match(p.name))]
        bad = []
        for _, path in sorted(found, reverse=True):
            try:
                manifest = manifests.read(path)
                manifests.check(path, manifest, self.settings.verify)
                return path, manifest
            except Damaged as damage:
                bad.append(f"{path}: {damage}")
                print(f"checkpoint {path} is passed over: {damage}")
        if bad:
            return UserError("every checkpoint is damaged:\n" + "\n".join(bad))
        return None

    def _write(self, step: int, snapshot: Snapshot) -> None:
        import json

        import torch.distributed.checkpoint as dcp

        try:
            final = self.folder / f"step-{step}"
            staged = self.folder / f"step-{step}.tmp"
            if self.world.rank == 0:
                shutil.rmtree(staged, ignore_errors=True)
                staged.mkdir(parents=True)
            dist.barrier(group=self.group)
            if snapshot.lanes:
                (staged / f"lanes-{self.world.rank}.json").write_text(json.dumps(snapshot.lanes))
            writer = dcp.FileSystemWriter(staged, single_file_per_rank=True, sync_files=True)
            dcp.save(_flat(snapshot), storage_writer=writer, process_group=self.group)
            dist.barrier(group=self.group)
            if self.world.rank == 0:
                files = {p.name: [p.stat().st_size, manifests.crc32(p)] for p in staged.iterdir()}
                Manifest(
                    step, files, snapshot.train_state, snapshot.identity, self.mesh, torch=torch.__version__
                ).write(staged)
                if final.exists():
                    shutil.rmtree(final)
                os.rename(staged, final)
                manifests.sync_folder(self.folder)
                self._retain()
            dist.barrier(group=self.group)
        except BaseException as error:
            self.error = error

    def _retain(self) -> None:
        keep = self.settings.keep_latest_k
        steps = sorted(int(m[1]) for p in self.folder.glob("step-*") if (m := STEP.match(p.name)))
        for step in steps[:-keep] if keep else []:
            if not (self.settings.keep_every and step % self.settings.keep_every == 0):
                shutil.rmtree(self.folder / f"step-{step}")


def _read_json(file: Path) -> dict[str, Any]:
    import json

    return json.loads(file.read_text())


def _flat(snapshot: Snapshot) -> dict[str, Tensor]:
    return {f"model.{name}": t for name, t in snapshot.model.items()} | {
        f"optimizer.{name}": t for name, t in snapshot.optimizer.items()
    }


def _copied(snapshot: Snapshot) -> Snapshot:
    def copy(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return DTensor.from_local(
                tensor.to_local().detach().clone(),
                tensor.device_mesh,
                tensor.placements,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        return tensor.detach().clone()

    return Snapshot(
        {name: copy(t) for name, t in snapshot.model.items()},
        {name: copy(t) for name, t in snapshot.optimizer.items()},
        dict(snapshot.train_state),
        dict(snapshot.lanes),
        snapshot.identity,
    )
