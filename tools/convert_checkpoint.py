#!/usr/bin/env python
"""Checkpoints to Hugging Face safetensors and back, tensor by tensor.

    python tools/convert_checkpoint.py outputs/checkpoint/step-20 exported            # to safetensors
    python tools/convert_checkpoint.py exported initial/step-0                        # to a checkpoint of weights
    python tools/convert_checkpoint.py outputs/checkpoint/step-20 exported --dtype bfloat16

Which way is told by what SRC is. Needs the extra hf (safetensors).
"""

import argparse
import sys
from pathlib import Path

import _environment  # noqa: F401

from titanlite.checkpoint import convert
from titanlite.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint step-N, or a Hugging Face folder")
    parser.add_argument("target", type=Path, metavar="DST", help="the folder to write; must not exist")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights; default: as they are"
    )
    arguments = parser.parse_args()
    try:
        print(convert.convert(arguments.source, arguments.target, arguments.dtype))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
