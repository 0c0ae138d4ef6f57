"""Which checkpoint a run loads: the newest that is intact, every damaged one named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.manifest import Damaged, Manifest
from titanlite.checkpoint.publish import STEP
from titanlite.errors import UserError

Check = Callable[[Path, Manifest], str]
"""Compares the files with the manifest; what is wrong, or "" where nothing is."""


def newest_intact(folder: Path, check: Check, at_most: int | None = None) -> tuple[Path, Manifest] | None:
    """The newest intact checkpoint in ``folder`` that a run can go on from; None where there are no checkpoints at all.

    Args:
        at_most: steps beyond are another run's and not looked at.

    Raises:
        UserError: there are some, but none is intact: starting over in silence would overwrite them.
    """
    refused: list[str] = []
    for path in candidates(folder):
        if at_most is not None and step_of(path) > at_most:
            continue
        try:
            manifest = manifests.read(path)
            if wrong := check(path, manifest):
                raise Damaged(wrong)
            if manifest.model_only:
                raise Damaged(
                    "it holds the weights alone (checkpoint.last_save_model_only): a run cannot go on from it"
                )
            if refused:
                print(f"checkpoint {path} is intact; going on from it", file=sys.stderr, flush=True)
            return path, manifest
        except Damaged as damage:
            refused.append(f"  {path}: {damage}")
            print(f"checkpoint {path} is passed over: {damage}", file=sys.stderr, flush=True)
    if refused:
        raise UserError(
            f"no checkpoint in {folder} can be gone on from:\n"
            + "\n".join(refused)
            + "\nmove them away to start over, "
            "or name one with checkpoint.initial_load_path"
        )
    return None


def one(path: Path, check: Check) -> tuple[Path, Manifest]:
    """The checkpoint at ``path``.

    Raises:
        UserError: it is not intact.
    """
    try:
        manifest = manifests.read(path)
        if wrong := check(path, manifest):
            raise Damaged(wrong)
        return path, manifest
    except Damaged as damage:
        raise UserError(f"checkpoint {path} cannot be loaded: {damage}") from None


def candidates(folder: Path) -> Iterator[Path]:
    """Folders named like a checkpoint, the highest step first, by number."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP.match(path.name))]
    for _, path in sorted(found, reverse=True):
        yield path


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix("step-"))
