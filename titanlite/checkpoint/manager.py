"""When state is saved, and what a run resumes from."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint import choice, restore, saver
from titanlite.checkpoint.publish import LeaseLost, Shelf
from titanlite.checkpoint.snapshot import Restored, Snapshot
from titanlite.errors import TrainingStopped, UserError

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.world import World

__all__ = ["CheckpointManager", "Restored", "Snapshot"]


class CheckpointManager:
    """Saves at the interval, one save in flight at most, and resumes from the newest intact checkpoint.

    Collectives of a save run beside those of training, so they have a gloo group of their own.
    """

    def __init__(self, config: Config, world: World, mesh: dict[str, int], folder: Path):
        self.config, self.settings, self.world, self.mesh = config, config.checkpoint, world, mesh
        self.shelf = Shelf(folder / self.settings.folder)
        self.group: dist.ProcessGroup | None = None
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.saved: int | None = None
        self.reached: int | None = None
        self.begun = False
        self.written_at = time.monotonic()
        self.stager: Any = None
        if self.settings.enable:
            self.group = dist.new_group(backend="gloo")
            if not self.settings.load_only:
                self._agreed(self.shelf.open)

    def due(self, step: int) -> bool:
        """Whether ``step`` is saved: by the interval, the first step where asked for, or by rank 0's clock."""
        if not self.settings.enable or self.settings.load_only:
            return False
        first = step == 1 and self.settings.enable_first_step_checkpoint
        return step % self.settings.interval == 0 or first or self._time_is_up()

    def save(self, step: int, make_snapshot: Callable[[], Snapshot], last: bool = False) -> float:
        """Save ``step``; returns the seconds that training waited.

        A step that is saved already is not saved again. ``last`` applies ``last_save_model_only`` and
        ``last_save_in_hf``.
        """
        settings = self.settings
        if not settings.enable or settings.load_only or (step == 0 and not settings.create_seed_checkpoint):
            return 0.0
        began = time.perf_counter()
        self.wait()
        if step != self.saved:
            model_only = last and settings.last_save_model_only
            snapshot = make_snapshot()
            tensors = snapshot.tensors(optimizer=not model_only)
            if model_only:
                tensors = saver.exported(tensors, settings.export_dtype)
            write = saver.Save(self, step, snapshot, model_only)
            self.saved, self.written_at = step, time.monotonic()
            if settings.async_mode == "disabled" or last:
                self._run(write, tensors)
            else:
                self.thread = threading.Thread(target=self._run, args=(write, self._staged(tensors)), name="checkpoint")
                self.thread.start()
        if last:
            self.poll(last=True)
            if settings.last_save_in_hf and self.world.rank == 0:
                from titanlite.checkpoint.hf import export

                export(
                    self.shelf.published(step), self.shelf.published(step) / "hf", self.config, settings.export_dtype
                )
        self.poll()
        return time.perf_counter() - began

    def poll(self, last: bool = False) -> None:
        """Tell how the save before ended.

        Raises:
            TrainingStopped: it failed, and the policy is to stop, or it was the last.
        """
        error, self.error = self.error, None
        if error is None:
            return
        # Not saved after all: the last save of the run tries again.
        self.saved = None
        if not isinstance(error, saver.SaveFailed | LeaseLost):
            raise error
        policy = self.settings.on_save_error
        stop = policy == "stop" or (policy == "auto" and self.settings.async_mode == "disabled")
        if stop or last or isinstance(error, LeaseLost):
            raise TrainingStopped(str(error)) from error
        if self.world.rank == 0:
            print(f"{error}; training goes on, the checkpoint before is intact", file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Wait until the save in flight is published."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.poll()

    def restore(self, snapshot: Snapshot) -> Restored | None:
        """Fill ``snapshot`` from where the config says; None where the run starts from its initial weights.

        Once the run is under way this is a rollback: to its own newest intact checkpoint, never to what it started
        from or to steps that an earlier run left beyond; None where it has none.
        """
        if not self.settings.enable:
            return None
        folder, step, first = self.shelf.folder, self.settings.load_step, not self.begun
        self.begun = True
        if not first:
            reached = self.reached
            if reached is None:
                return None
            found = self._decided(lambda check: choice.newest_intact(folder, check, at_most=reached))
        elif step >= 0:
            found = self._decided(lambda check: choice.one(self.shelf.published(step), check))
        else:
            found = self._decided(lambda check: choice.newest_intact(folder, check))
        if found is not None:
            path, manifest = found
            self.saved = self.reached = manifest.step
            return restore.own(self, path, manifest, snapshot)
        return restore.initial(self, snapshot) if first and self.settings.initial_load_path else None

    def newest(self) -> str | None:
        """The checkpoint that this run saved or resumed last, as text."""
        return str(self.shelf.published(self.saved)) if self.saved is not None else None

    def close(self) -> None:
        """Wait for the save in flight."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, by rank."""
        if self.world.size == 1:
            return [value]
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _decided(self, choose: Callable[[choice.Check], Any]) -> Any:
        """Let rank 0 choose while all ranks verify their share of each candidate's files; all get its answer."""
        if self.world.rank > 0:
            return restore.serve(self)
        answer: Any
        try:
            answer = choose(lambda path, manifest: restore.verify(self, path, manifest))
        except UserError as error:
            answer = error
        return restore.answered(self, answer)

    def _agreed(self, act: Callable[[], None]) -> None:
        """Do something on rank 0 whose failure all ranks should hear as a message."""
        told = ""
        if self.world.rank == 0:
            try:
                act()
            except OSError as error:
                told = f"checkpoint folder {self.shelf.folder} cannot be written: {error}"
        told = self.gather(told)[0]
        if told:
            raise UserError(told)

    def _run(self, write: saver.Save, tensors: dict[str, Tensor]) -> None:
        try:
            write.run(tensors)
            self.reached = write.step
        except BaseException as error:
            self.error = error

    def _staged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy in CPU memory, which the optimizer cannot touch; pinned buffers are kept for the next time."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        accelerator = self.world.device.type != "cpu"
        if self.stager is None:
            pinned = accelerator and self.settings.async_mode == "async_with_pinned_mem"
            self.stager = DefaultStager(StagingOptions(pinned, False, False, pinned))
        staged = self.stager.stage(tensors)
        if accelerator:
            torch.cuda.synchronize()
        return staged

    def _time_is_up(self) -> bool:
        minutes = self.settings.time_interval_minutes
        if minutes is None:
            return False
        # Not over the saves' group: one may be in flight there, on its own thread.
        told = torch.tensor([int(time.monotonic() - self.written_at > 60 * minutes)])
        if self.world.size > 1:
            dist.broadcast(told, src=0, group=self.world.cpu_group)
        return bool(told)
