#!/usr/bin/env python
"""Peak memory above parameters and gradients: the chunked loss, and each policy of activation checkpointing.

    python tools/bench/memory.py [--json]

``ours`` is a policy, ``theirs`` doing without (the loss in one piece, every activation kept), in GiB. On a GPU its
allocator is asked; elsewhere every storage is followed from its first operation to its end, on fake tensors: exact to
the byte of what PyTorch allocates, without the arithmetic.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import _environment  # noqa: F401
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIB = 2**30
VOCABULARY, DIM, TOKENS, BLOCKS = 128_256, 1024, 4096, 8

POLICIES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "every 2nd block": {"mode": "selective", "selective_ac_option": "2"},
    "full": {"mode": "full"},
}


class Storages(TorchDispatchMode):
    """Follows every storage that operations make, while any tensor holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._ended, key)

    def _ended(self, key: int) -> None:
        self.now -= self.live.pop(key)


@contextlib.contextmanager
def _peak(found: list[float]) -> Iterator[None]:
    """Append the highest number of bytes at any time inside."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        found.append(torch.cuda.max_memory_allocated() - before)
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), Storages() as storages:
        yield
        found.append(storages.peak)


def above_state(make: Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor]]]) -> float:
    """Peak bytes of a forward and backward pass, less those of the parameters and their gradients."""
    found: list[float] = []
    with _peak(found):
        module, loss = make()
        loss().backward()
        state = sum(2 * parameter.nbytes for parameter in module.parameters())
        del module, loss
    return found[0] - state


def head(chunks: int) -> float:
    """The output head alone: ``TOKENS`` hidden states of width ``DIM`` over ``VOCABULARY``."""

    def make():
        from titanlite.models.loss import Output

        output = Output(DIM, VOCABULARY)
        output.chunks = chunks
        hidden = torch.zeros(1, TOKENS, DIM, requires_grad=True)
        labels = torch.zeros(1, TOKENS, dtype=torch.int64)
        return output, lambda: output(hidden, labels)

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return above_state(make)


def blocks(policy: str, number: int = BLOCKS) -> float:
    """A model of ``number`` blocks of width ``DIM`` over one row of ``TOKENS``, with a small vocabulary."""

    def make():
        from titanlite.config import from_dict
        from titanlite.models.decoder import Decoder
        from titanlite.models.sizes import sizes_of
        from titanlite.parallel import activation_checkpoint

        model = {"dim": DIM, "n_layers": number, "n_heads": 16, "n_kv_heads": 8, "head_dim": 64, "ffn_dim": 3584}
        config = from_dict({"model": model, "activation_checkpoint": POLICIES[policy]})
        decoder = Decoder(sizes_of(config.model))
        activation_checkpoint.apply(decoder, config)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        return decoder, lambda: decoder(tokens, tokens)

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return above_state(make)


def main() -> None:
    """Measure both and compare."""
    from _report import case, report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    cases = {"chunked loss": case([head(0) / GIB], [head(1) / GIB])}
    plain = blocks("none") / GIB
    for policy in POLICIES:
        cases[f"checkpointing {policy}"] = case([blocks(policy) / GIB], [plain])
    report(cases, arguments.json, "GiB")


if __name__ == "__main__":
    main()
