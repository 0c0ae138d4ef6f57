"""Pipelines on paper: which modules make a stage, which rank runs it, in which order, and how much of it is waiting.

No torch here: the plan reads these before anything is built.
"""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titanlite.errors import UserError

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.config.schema import Parallelism

ONE_STAGE = ("1F1B", "GPipe")
"""Schedules that run one stage on each rank."""

LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
"""Schedules where rank r runs stages r, r + p, r + 2p, ..."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules where rank r runs the two stages r and 2p - 1 - r, so that the loss is on the first rank."""

SPLIT = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that run the two halves of a backward pass apart: gradients of the inputs now, of the weights later."""

SCHEDULES = ONE_STAGE + LOOPED + V_SHAPED

COST = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time units of a forward, a backward, and of a backward's halves: gradients of the inputs and of the weights."""


class Action(NamedTuple):
    """One rank's work on one micro-batch: ``kind`` is a key of ``COST``."""

    stage: int
    kind: str
    micro_batch: int


def schedule_name(parallelism: Parallelism) -> str:
    """The configured schedule as torch spells it; "csv" where a file gives the order.

    Raises:
        UserError: there is no such schedule.
    """
    if parallelism.pipeline_parallel_schedule_csv:
        return "csv"
    names = {name.lower(): name for name in SCHEDULES}
    asked = parallelism.pipeline_parallel_schedule
    if asked.lower() not in names:
        raise UserError(
            f"parallelism.pipeline_parallel_schedule = {asked!r} is not a schedule; there are {', '.join(SCHEDULES)}"
        )
    return names[asked.lower()]


def splits_backward(parallelism: Parallelism) -> bool:
    """Whether the configured schedule runs the two halves of a backward pass apart."""
    name = schedule_name(parallelism)
    if name != "csv":
        return name in SPLIT
    order = read_csv(parallelism.pipeline_parallel_schedule_csv)
    return any(action.kind == "I" for actions in order.values() for action in actions)


def micro_batches(config: Config, rows: int = 0) -> int:
    """How many micro-batches one round of the pipeline carries: its rows, local_batch_size or fewer, over their size.

    Raises:
        UserError: it is not a whole number.
    """
    size = config.parallelism.pipeline_parallel_microbatch_size
    rows = rows or config.training.local_batch_size
    if rows % size:
        raise UserError(
            f"training.local_batch_size = {rows} is not a multiple of parallelism.pipeline_parallel_microbatch_size"
            f" = {size}"
        )
    return rows // size


def stage_modules(config: Config, n_layers: int) -> list[list[str]]:
    """The modules of every stage, in order, by name: "tok_embeddings", "layers.0", ..., "norm", "output".

    As torchtitan does, the embedding counts as ``pipeline_parallel_first_stage_less_layers`` blocks and norm and output
    as ``pipeline_parallel_last_stage_less_layers``, and the stages are as even as that allows, the first ones longer.

    Raises:
        UserError: the keys ask for stages that cannot be.
    """
    keys = config.parallelism
    whole = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]
    if keys.module_fqns_per_model_part:
        stages = [list(names) for names in keys.module_fqns_per_model_part]
        if [name for names in stages for name in names] != whole:
            raise UserError(
                "parallelism.module_fqns_per_model_part must name every module once, in the model's order: "
                f"{', '.join(whole)}"
            )
    else:
        stages = _even_stages(config, n_layers, _stage_count(config, n_layers))
    per_rank(len(stages), keys)
    return stages


def _stage_count(config: Config, n_layers: int) -> int:
    keys = config.parallelism
    if keys.pipeline_parallel_schedule_csv:
        order = read_csv(keys.pipeline_parallel_schedule_csv)
        return 1 + max(action.stage for actions in order.values() for action in actions)
    if keys.pipeline_parallel_layers_per_stage:
        weight = n_layers + keys.pipeline_parallel_first_stage_less_layers
        weight += keys.pipeline_parallel_last_stage_less_layers
        return math.ceil(weight / keys.pipeline_parallel_layers_per_stage)
    return keys.pipeline_parallel_degree * (1 if schedule_name(keys) in ONE_STAGE else 2)


def _even_stages(config: Config, n_layers: int, count: int) -> list[list[str]]:
    keys = config.parallelism
    first, last = keys.pipeline_parallel_first_stage_less_layers, keys.pipeline_parallel_last_stage_less_layers
    share, longer = divmod(n_layers + first + last, count)
    lengths = [share + (i < longer) for i in range(count)]
    lengths[0] -= first
    lengths[-1] -= last
    # The ends may consist of just the embedding or just the head, a stage between may not be empty.
    if min(lengths) < 0 or any(length == 0 for length in lengths[1:-1]):
        raise UserError(
            f"{n_layers} layers do not make {count} pipeline stages with "
            f"parallelism.pipeline_parallel_first_stage_less_layers = {first} and last_stage_less_layers = {last}: "
            "use fewer stages, or set both to 0"
        )
    stages, start = [], 0
    for length in lengths:
        stages.append([f"layers.{i}" for i in range(start, start + length)])
        start += length
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def per_rank(count: int, keys: Parallelism) -> int:
    """How many of ``count`` stages each rank runs.

    Raises:
        UserError: the schedule cannot run that many.
    """
    name, degree = schedule_name(keys), keys.pipeline_parallel_degree
    each, left = divmod(count, degree)
    if left or not each:
        raise UserError(f"{count} pipeline stages cannot be dealt to pipeline_parallel_degree = {degree} ranks evenly")
    if (name in ONE_STAGE and each != 1) or (name in V_SHAPED and each != 2) or (name in LOOPED and each < 2):
        takes = {**dict.fromkeys(ONE_STAGE, "1 stage"), **dict.fromkeys(V_SHAPED, "2 stages")}.get(
            name, "2 stages or more"
        )
        raise UserError(
            f"schedule {name} runs {takes} on each rank, but {count} stages on pipeline_parallel_degree = {degree} "
            f"ranks make {each}; see parallelism.pipeline_parallel_layers_per_stage"
        )
    return each


def stages_of(rank: int, count: int, keys: Parallelism) -> list[int]:
    """The numbers of the stages that pipeline rank ``rank`` runs, ascending."""
    degree = keys.pipeline_parallel_degree
    name = schedule_name(keys)
    if name == "csv":
        return sorted({action.stage for action in read_csv(keys.pipeline_parallel_schedule_csv)[rank]})
    if name in V_SHAPED:
        return [rank, 2 * degree - 1 - rank]
    return list(range(rank, count, degree))


def rank_of_loss(count: int, keys: Parallelism) -> int:
    """The pipeline rank of the last stage: the only one that knows the loss."""
    return next(r for r in range(keys.pipeline_parallel_degree) if count - 1 in stages_of(r, count, keys))


def read_csv(path: str | Path | None) -> dict[int, list[Action]]:
    """The order in a file in torch's compute-only format: a line a rank, cells like 2F0, 2I0, 2W0, 2B0, or empty.

    Raises:
        UserError: the file cannot be read, or a cell is none of these.
    """
    try:
        rows = list(csv.reader(Path(path or "").read_text().splitlines()))
    except OSError as error:
        raise UserError(f"parallelism.pipeline_parallel_schedule_csv: {error}") from None
    order: dict[int, list[Action]] = {}
    for rank, row in enumerate(rows):
        order[rank] = []
        for cell in row:
            text = re.sub(r"^\((.*)\)OVERLAP_F_B$", r"\1", cell.strip())
            for piece in filter(None, text.split(";")):
                found = re.fullmatch(r"(\d+)([FBIW])(\d+)", piece)
                if not found:
                    raise UserError(f"{path}, line {rank + 1}: {cell!r} is not an action such as 2F0, 2B0, 2I0 or 2W0")
                order[rank].append(Action(int(found[1]), found[2], int(found[3])))
    if not order or not all(order.values()):
        raise UserError(f"{path}: every line must give one rank's actions")
    return order


def one_stage_order(name: str, ranks: int, micro_batches: int) -> dict[int, list[Action]]:
    """What GPipe (all forwards, then all backwards) and 1F1B (one of each once the pipe is full) do."""
    order = {}
    for rank in range(ranks):
        ahead = micro_batches if name == "GPipe" else min(micro_batches, ranks - rank)
        actions = [Action(rank, "F", i) for i in range(ahead)]
        for i in range(micro_batches):
            actions.append(Action(rank, "B", i))
            if ahead + i < micro_batches:
                actions.append(Action(rank, "F", ahead + i))
        order[rank] = actions
    return order


def bubble(order: dict[int, list[Action]]) -> float:
    """The share of the ranks' time spent waiting, with every stage as long as the others and free communication.

    For 1F1B and GPipe this is (p - 1) / (m + p - 1).

    Raises:
        UserError: the order waits for itself.
    """
    last = max(action.stage for actions in order.values() for action in actions)
    done: dict[Action, int] = {}
    clock, place = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    while any(place[rank] < len(actions) for rank, actions in order.items()):
        moved = False
        for rank, actions in order.items():
            while place[rank] < len(actions):
                action = actions[place[rank]]
                ready = _ready(action, last, done)
                if ready is None:
                    break
                clock[rank] = max(clock[rank], ready) + COST[action.kind]
                done[action] = clock[rank]
                place[rank] += 1
                moved = True
        if not moved:
            waiting = {rank: actions[place[rank]] for rank, actions in order.items() if place[rank] < len(actions)}
            stuck = ", ".join(f"rank {rank} at {a.stage}{a.kind}{a.micro_batch}" for rank, a in waiting.items())
            raise UserError(f"the pipeline schedule waits for itself: {stuck}")
    busy = sum(COST[action.kind] for actions in order.values() for action in actions)
    return 1.0 - busy / (len(order) * max(clock.values()))


def _ready(action: Action, last: int, done: dict[Action, int]) -> int | None:
    """When what ``action`` needs is there, None while it is not."""
    stage, kind, micro = action
    needs: list[tuple[Action, ...]]
    if kind == "F":
        needs = [(Action(stage - 1, "F", micro),)] if stage else []
    elif kind == "W":
        needs = [(Action(stage, "I", micro),)]
    else:
        needs = [(Action(stage, "F", micro),)]
        if stage < last:
            needs.append((Action(stage + 1, "B", micro), Action(stage + 1, "I", micro)))
    times = [max((done[a] for a in either if a in done), default=None) for either in needs]
    return None if None in times else max((t for t in times if t is not None), default=0)
