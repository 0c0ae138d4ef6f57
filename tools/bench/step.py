#!/usr/bin/env python
"""titanlite's training step against a bare PyTorch loop: same model file, same batch, same optimizer, nothing else.

    python tools/bench/step.py                    # 1 and 2 processes, fp32 and bf16, eager
    python tools/bench/step.py --compile          # also compiled
    python tools/bench/step.py --json

Both sides live in the same processes and take turns, a few steps each. The bare loop with two processes is
``fully_shard`` by hand with its own averaging; with bf16 and one process it is FSDP2's mixed precision too, because
autocast computes something else. Times are per step.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import os
import tempfile
import time

import _environment  # noqa: F401
import torch
import torch.distributed as dist

from titanlite.config import Config, from_dict

ROWS, SEQ_LEN = 8, 512


def settings(processes: int, precision: str, compiled: bool, folder: str) -> dict:
    """The config of one case; the debug model at a size where a step takes over 0.2 s on two CPU cores."""
    return {
        "job": {"dump_folder": folder},
        "training": {
            "local_batch_size": ROWS // processes,
            "global_batch_size": ROWS,
            "seq_len": SEQ_LEN,
            "steps": 10_000,
            "mixed_precision_param": precision,
        },
        "activation_checkpoint": {"mode": "none"},
        "compile": {"enable": compiled},
        "metrics": {"log_freq": 1_000},
    }


class Bare:
    """What a user would write by hand."""

    def __init__(self, config: Config, batch, device: torch.device):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from titanlite.models.registry import family
        from titanlite.models.sizes import sizes_of

        torch.manual_seed(0)
        self.model = family(config.model.name).build(sizes_of(config.model)).to(device)
        if config.compile.enable:
            for block in self.model.layers.values():
                block.compile()
        bf16 = config.training.mixed_precision_param == "bfloat16"
        if dist.get_world_size() > 1 or bf16:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            policy = (
                MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                if bf16
                else MixedPrecisionPolicy()
            )
            for module in [self.model.tok_embeddings, *self.model.layers.values(), self.model.output, self.model]:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.tokens, self.labels = batch.tokens.to(device), batch.labels.to(device)

    def step(self) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad()
        loss = self.model(self.tokens, self.labels) / self.labels.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss.item(), norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()


def measure(processes: int, precision: str, compiled: bool, rounds: int, steps: int) -> dict[str, float] | None:
    """One case in this rank; rank 0 returns it."""
    from _report import case

    from titanlite.distributed.world import World
    from titanlite.train import Trainer

    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    config = from_dict(settings(processes, precision, compiled, folder), world_size=processes)
    world = World.start(config.comm)
    trainer = Trainer(config, world)
    trainer.begin()
    bare = Bare(config, trainer.loader.next(), world.device)

    def timed(step) -> float:
        world.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps

    for _ in range(2):
        trainer.step(), bare.step()
    pairs = []
    for i in range(rounds):  # who goes first changes too
        sides = [trainer.step, bare.step] if i % 2 == 0 else [bare.step, trainer.step]
        times = [timed(side) for side in sides]
        pairs.append(times if i % 2 == 0 else times[::-1])
    rank = world.rank
    trainer.close()
    del trainer, bare
    world.close()
    return case([a for a, _ in pairs], [b for _, b in pairs]) if rank == 0 else None


def main() -> None:
    """Run every case, each in processes of its own."""
    from _report import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--compile", action="store_true", help="also the compiled cases")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn")
    arguments = parser.parse_args()
    cases = {}
    for compiled in [False, True] if arguments.compile else [False]:
        for processes in (1, 2):
            for precision in ("float32", "bfloat16"):
                name = f"{processes} process{'es' * (processes > 1)} {precision} {'compiled' if compiled else 'eager'}"
                case_args = (processes, precision, compiled, arguments.rounds, arguments.steps)
                cases[name] = in_processes(processes, case_args)
    report(cases, arguments.json)


def in_processes(processes: int, arguments: tuple, measurement=measure) -> dict[str, float]:
    """Run ``measurement`` in so many fresh processes and return rank 0's answer."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        context.Process(target=_worker, args=(rank, processes, store.port, measurement, arguments, answers))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a process of the benchmark failed; its error stands above")
    return answers.get()


def _worker(rank: int, processes: int, port: int, measurement, arguments: tuple, answers) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    answer = measurement(*arguments)
    if rank == 0:
        answers.put(answer)


if __name__ == "__main__":
    main()
