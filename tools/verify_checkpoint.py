#!/usr/bin/env python
"""Whether checkpoints are intact, and why not.

    python tools/verify_checkpoint.py outputs/checkpoint            # every step
    python tools/verify_checkpoint.py outputs/checkpoint/step-20    # one

Prints a line a checkpoint. Exit code 0 where all are intact, 1 where one is not, 2 where there is none.
"""

import argparse
import sys
from pathlib import Path

import _environment  # noqa: F401

from titanlite.checkpoint import choice
from titanlite.checkpoint import manifest as manifests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint, or a folder of checkpoints")
    parser.add_argument("--size", action="store_true", help="compare sizes only, not every byte")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    found = list(choice.candidates(folder)) or ([folder] if (folder / manifests.MANIFEST).exists() else [])
    if not found:
        print(f"{folder}: there is no checkpoint", file=sys.stderr)
        return 2
    damaged = 0
    for path in found:
        try:
            manifest = manifests.read(path)
            manifests.check(path, manifest, "size" if arguments.size else "checksum")
            size = sum(size for size, _ in manifest.files.values())
            print(f"{path}: intact, step {manifest.step}, {len(manifest.files)} files, {size / 2**20:.1f} MiB")
        except manifests.Damaged as damage:
            damaged += 1
            print(f"{path}: not intact: {damage}")
    return 1 if damaged else 0


if __name__ == "__main__":
    sys.exit(main())
