"""What a rank communicates: a dispatch mode that counts the calls and bytes of each kind of collective."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter_": "scatter",
    "gather_": "gather",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}


class Traffic(TorchDispatchMode):
    """Collectives by kind while active, as this rank calls them.

    Bytes are those of the whole: what an all-gather returns, what a reduce-scatter takes, what an all-reduce or a
    message holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what a DTensor does shows up as operations on its local tensor
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "titanlite::to_next_rank":  # its send and receive are out of sight inside
            for kind in ("send", "recv"):
                self.calls[kind] += 1
                self.bytes[kind] += _size(out)
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            if name not in ("wait_tensor", "_wrap_tensor_autograd"):
                kind = KINDS.get(name, name)
                self.calls[kind] += 1
                self.bytes[kind] += max(_size(args), _size(out))
        return out

    def seen(self) -> dict[str, tuple[int, int]]:
        """kind -> (calls, bytes)"""
        return {kind: (self.calls[kind], self.bytes[kind]) for kind in sorted(self.calls)}


def _size(tree: Any) -> int:
    """Bytes of the largest tensor list in ``tree``: the whole side of a collective."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, (list, tuple)):
        tensors = [item for item in tree if isinstance(item, Tensor)]
        if tensors:
            own = sum(_size(t) for t in tensors) if isinstance(tree, list) else max(_size(t) for t in tensors)
            return max(own, *(_size(i) for i in tree if not isinstance(i, Tensor)), 0)
        return max((_size(item) for item in tree), default=0)
    return 0
