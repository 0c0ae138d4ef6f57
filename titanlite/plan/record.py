"""What a piece of real code does on this rank: collectives, memory and floating-point operations, by dispatch mode."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite.distributed.private_fake import in_backward, size_of_group

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv")
SPELLINGS = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}


class Recorder(TorchDispatchMode):
    """While active: the collectives, the live bytes at the worst, and the operations, of this rank alone.

    DTensors pass through, so that what is counted are the operations on their local tensors.

    Attributes:
        calls, bytes: by (kind, ranks of the group); bytes of the whole, as ``communication`` counts them.
        flops: operations of matmuls and attention, causal attention halved.
        peaks: by phase (forward, backward, or what ``phase`` is set to), the most bytes alive at once, and the storages
            alive then: identity -> (bytes, weak reference).
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()
        self.flops = 0.0
        self.phase = ""
        self.paused = False
        self.peaks: dict[str, tuple[int, dict[int, tuple[int, Any]]]] = {}
        self.storages: dict[int, Any] = {}
        self._see(list(known))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.paused:
            self._see(out)
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.split("::")[1]
        if func._schema.name == "titanlite::to_next_rank":  # its send and receive are out of sight inside
            for kind in ("send", "recv"):
                key = kind, _ranks(args)
                self.calls[key] += 1
                self.bytes[key] += _whole(out)
        elif func.namespace in ("c10d", "_c10d_functional"):
            sort = _kind(name)
            if sort is not None:
                key = sort, _ranks((*args, *kwargs.values()))
                self.calls[key] += 1
                self.bytes[key] += max(_whole(args), _whole(out))
        elif name in FORMULAS:
            self.flops += FORMULAS[name](args, out)

    def _see(self, tree: Any) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        live = {key: storage.nbytes() for key, ref in self.storages.items() if (storage := ref()) is not None}
        if len(live) < len(self.storages):
            self.storages = {key: self.storages[key] for key in live}
        total = sum(live.values())
        phase = self.phase or ("backward" if in_backward() else "forward")
        if total > self.peaks.get(phase, (0, {}))[0]:
            self.peaks[phase] = total, {key: (size, self.storages[key]) for key, size in live.items()}


def _kind(name: str) -> str | None:
    for part, kind in SPELLINGS.items():
        name = name.replace(part, kind)
    if name.startswith("wait") or "wrap" in name:
        return None
    return next((kind for kind in KINDS if kind in name), None)


def _ranks(args: Any) -> int:
    return next((size for argument in args if (size := size_of_group(argument)) is not None), 0)


def _whole(tree: Any) -> int:
    """Bytes of the largest tensor or list of tensors in ``tree``: the whole side of a collective."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, (list, tuple)):
        tensors = [item for item in tree if isinstance(item, Tensor)]
        sizes = [_whole(item) for item in tensors]
        own = (sum(sizes) if isinstance(tree, list) else max(sizes)) if sizes else 0
        return max([own, *(_whole(item) for item in tree if not isinstance(item, Tensor))])
    return 0


def _mm(args: Any, out: Any) -> float:
    return 2.0 * args[-2].shape[0] * args[-2].shape[1] * args[-1].shape[1]


def _bmm(args: Any, out: Any) -> float:
    return 2.0 * args[-2].shape[0] * args[-2].shape[1] * args[-2].shape[2] * args[-1].shape[2]


def _attention(args: Any, out: Any) -> float:
    q, k = args[0], args[1]
    causal = next((value for value in args[3:] if isinstance(value, bool)), False)
    return 4.0 * q.numel() * k.shape[2] * (0.5 if causal else 1.0)


def _attention_backward(args: Any, out: Any) -> float:
    q, k = args[1], args[2]
    causal = next((value for value in args[6:] if isinstance(value, bool)), False)
    return 10.0 * q.numel() * k.shape[2] * (0.5 if causal else 1.0)


FORMULAS = {
    "mm": _mm,
    "addmm": _mm,
    "addmm_": _mm,
    "_scaled_mm": _mm,
    "bmm": _bmm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
}


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Identities of the storages of ``tensors``' local pieces."""
    return {local(tensor).untyped_storage()._cdata for tensor in tensors}
