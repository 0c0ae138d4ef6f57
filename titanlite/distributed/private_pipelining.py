"""Every use of torch's private pipelining API, one function each, with the reason.

Apart from ``private.py`` because torch's pipelining takes a second to import. Checked against torch 2.11 to 2.14;
``tests/distributed/test_private_pipelining.py`` fails when one of them goes away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from titanlite.parallel.schedule import Action


def compute_actions(actions: Iterable[Any]) -> Iterator[Action]:
    """One rank's forwards and backwards out of torch's list, which holds idle steps and overlapped pairs too."""
    for action in actions:
        if action is not None:
            for piece in action.sub_actions or (action,):
                if piece.computation_type.value in "FBIW":
                    yield Action(piece.stage_index, piece.computation_type.value, piece.microbatch_index)


def schedule_from_csv(stages: list[Any], micro_batches: int, loss: Callable, path: str | Path) -> PipelineScheduleMulti:
    """The schedule whose order is in a file; torch has no public way to run one."""
    made = schedules._PipelineScheduleRuntime(stages, micro_batches, loss_fn=loss, scale_grads=False)
    made._load_csv(str(path), format="compute_only")
    return made


def keep_buffers_between_halves_of_backward() -> None:
    """Stop the compiler from reusing a backward's inputs in place: split schedules read them again for the weights."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


@contextmanager
def only_forward(made: Any) -> Iterator[None]:
    """Let ``made.eval`` run no backward steps: those of V-shaped schedules fail without gradients to hand over.

    What is left of each rank's list keeps its order, so sends still meet their receives.
    """
    full = getattr(made, "pipeline_order_with_comms", None)
    if full is None:
        yield
        return
    keep = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    pieces = {rank: [p for a in actions for p in a.sub_actions or (a,)] for rank, actions in full.items()}
    made.pipeline_order_with_comms = {
        rank: [piece for piece in actions if piece.computation_type.value in keep] for rank, actions in pieces.items()
    }
    try:
        yield
    finally:
        made.pipeline_order_with_comms = full
