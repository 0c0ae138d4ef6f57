#!/usr/bin/env python
"""Text from a trained model.

    python tools/generate.py --checkpoint outputs/checkpoint --prompt "def main"
    python tools/generate.py --checkpoint exported/ --prompt "a" --prompt "b" --temperature 0.8 --top-p 0.9 --seed 1
    torchrun --nproc-per-node 2 tools/generate.py --checkpoint outputs/checkpoint --prompt "class"    # tensor parallel

--checkpoint is a step-N, a folder of them, or a Hugging Face folder (needs the extra hf).
"""

import argparse
import sys
from pathlib import Path

import _environment  # noqa: F401


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times: a batch")
    parser.add_argument("--tokens", type=int, default=64, help="at most so many new tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="as model.hf_assets_path; default: the run's")
    arguments = parser.parse_args()
    if arguments.temperature < 0 or not 0 < arguments.top_p <= 1 or arguments.tokens < 1:
        parser.error("--temperature must not be negative, --top-p lie in (0, 1], --tokens be positive")

    import torch.distributed as dist

    from titanlite.config import from_dict
    from titanlite.distributed.world import World
    from titanlite.errors import UserError
    from titanlite.generate import generate
    from titanlite.pretrained import load

    world = World.start(from_dict({}).comm)
    try:
        model, tokenizer = load(arguments.checkpoint, world, arguments.tokenizer)
        prompts = [
            [*([tokenizer.bos_id] if tokenizer.bos_id is not None else []), *tokenizer.encode(p).tolist()]
            for p in arguments.prompt
        ]
        if not all(prompts):
            raise UserError("a prompt is empty, and this tokenizer has no token that begins a text")

        def heard(chosen):
            if world.size > 1:
                dist.broadcast(chosen, src=0)
            return chosen

        made = generate(
            model,
            prompts,
            arguments.tokens,
            tokenizer.eos_id,
            arguments.temperature,
            arguments.top_p,
            arguments.seed,
            heard,
            multiple=world.size,
        )
        if world.rank == 0:
            for prompt, tokens in zip(arguments.prompt, made, strict=True):
                print(f"{prompt}{tokenizer.decode(tokens)}\n")
        del model
    except UserError as error:
        if world.rank == 0:
            print(error, file=sys.stderr)
        return 2
    finally:
        world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
