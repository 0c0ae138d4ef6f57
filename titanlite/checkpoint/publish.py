"""Checkpoints appear whole or not at all: staged beside their place, synced, listed, renamed.

checkpoint/step-20.4f0c1a2b.tmp/    being written
checkpoint/step-10/                 published: has a manifest
checkpoint/lease.json               whose turn it is to publish here
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Manifest, sync_folder

STEP = re.compile(r"step-(\d+)$")
LEASE = "lease.json"


class LeaseLost(Exception):
    """Another run has begun to write here: this one may be a node that was cut off, and must not publish."""


class Shelf:
    """The folder of a run's checkpoints, as rank 0 writes to it.

    Attributes:
        incarnation: this start of the run; a later one takes the lease over.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.incarnation = uuid.uuid4().hex[:8]

    def open(self) -> None:
        """Take the lease, and clear away what a crash left half-written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lease = self.folder / f"{LEASE}.{self.incarnation}"
        lease.write_text(json.dumps({"incarnation": self.incarnation, "pid": os.getpid()}))
        os.replace(lease, self.folder / LEASE)
        for left in self.folder.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def staged(self, step: int) -> Path:
        """Where the files of ``step`` are written."""
        return self.folder / f"step-{step}.{self.incarnation}.tmp"

    def published(self, step: int) -> Path:
        """Where ``step`` will be."""
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending; whether they are intact is another question."""
        found = (STEP.match(path.name) for path in self.folder.glob("step-*") if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def require_lease(self) -> None:
        """Raises LeaseLost where another incarnation holds the lease."""
        try:
            holder = json.loads((self.folder / LEASE).read_text())["incarnation"]
        except (OSError, ValueError, KeyError):
            holder = "nobody"
        if holder != self.incarnation:
            raise LeaseLost(f"another run ({holder}) writes to {self.folder} now; this one must not")

    def publish(self, step: int, manifest: Manifest) -> Path:
        """Make the staged files of ``step`` the checkpoint; one of the same step that is there steps aside first."""
        staged, final = self.staged(step), self.published(step)
        manifest.write(staged)
        self.require_lease()
        aside = self.folder / f"step-{step}.{self.incarnation}.old.tmp"
        if final.exists():
            os.rename(final, aside)
        os.rename(staged, final)
        sync_folder(self.folder)
        shutil.rmtree(aside, ignore_errors=True)
        return final

    def discard(self, step: int) -> None:
        """Throw away what was staged of ``step``."""
        shutil.rmtree(self.staged(step), ignore_errors=True)

    def retain(self, newest: int, keep_latest: int, keep_every: int | None) -> None:
        """Delete the oldest beyond ``keep_latest`` that a run can go on from; 0 keeps all.

        Folders that are not whole and those of weights alone neither count nor go: with them counted, the last state
        that a run can go on from would be deleted in their favour.
        """
        whole = [step for step in self.steps() if step <= newest and self._can_be_gone_on_from(step)]
        doomed = whole[:-keep_latest] if keep_latest else []
        for step in doomed:
            if not (keep_every and step % keep_every == 0):
                # Renamed first: a deletion that is cut short must not leave a folder that looks like a checkpoint.
                gone = self.folder / f"step-{step}.{self.incarnation}.gone.tmp"
                os.rename(self.published(step), gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _can_be_gone_on_from(self, step: int) -> bool:
        try:
            return not manifests.read(self.published(step)).model_only
        except manifests.Damaged:
            return False
