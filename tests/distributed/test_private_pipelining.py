"""torch's private pipelining API does what it is used for."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from titanlite.config import from_dict
from titanlite.distributed import private_pipelining as private
from titanlite.parallel import pipeline, schedule
from titanlite.parallel.schedule import LOOPED, SCHEDULES, V_SHAPED

SIZES = {"dim": 64, "n_layers": 16, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "ffn_dim": 64}


def config(name, ranks=4, rows=8):
    parallelism = {"pipeline_parallel_degree": ranks, "pipeline_parallel_schedule": name}
    return from_dict(
        {"model": SIZES, "parallelism": parallelism, "training": {"local_batch_size": rows}}, world_size=ranks
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_order_runs_every_micro_batch_of_every_stage_forwards_and_backwards(name):
    order = pipeline.order(config(name))
    actions = [action for actions in order.values() for action in actions]
    assert len(set(actions)) == len(actions)
    stages = 4 * (1 if name in schedule.ONE_STAGE else 2)
    pairs = {(stage, micro) for stage in range(stages) for micro in range(8)}
    assert {(stage, micro) for stage, kind, micro in actions if kind == "F"} == pairs
    assert {(stage, micro) for stage, kind, micro in actions if kind in "BI"} == pairs
    assert {a[::2] for a in actions if a.kind == "I"} == {a[::2] for a in actions if a.kind == "W"}
    for rank, own in order.items():
        assert {stage for stage, *_ in own} == set(schedule.stages_of(rank, stages, config(name).parallelism))


def test_bubbles_rank_the_schedules_as_their_papers_do():
    share = {name: pipeline.bubble_fraction(config(name)) for name in SCHEDULES}
    assert share["1F1B"] == share["GPipe"] == pytest.approx(3 / 11)
    # Two stages a rank halve the bubble, https://arxiv.org/abs/2104.04473: (p - 1) / (2m + p - 1).
    assert share["Interleaved1F1B"] == pytest.approx(3 / 19)
    assert share["InterleavedZeroBubble"] < share["Interleaved1F1B"]
    assert share["ZBVZeroBubble"] <= share["InterleavedZeroBubble"]
    assert all(0 <= value < 0.3 for value in share.values())
    assert (
        pipeline.describe(config("1F1B")) == "1F1B, 4 stages, 8 micro-batches a round, ranks wait about 27% of a step"
    )


@pytest.mark.parametrize("name", LOOPED + V_SHAPED)
def test_only_forward_leaves_forwards_and_their_messages(name):
    made = pipeline._construct(
        name,
        [
            SimpleNamespace(stage_index=i, num_stages=8, group_size=4, group_rank=0, submod=nn.Identity())
            for i in schedule.stages_of(0, 8, config(name).parallelism)
        ],
        8,
        None,
    )
    before = made.pipeline_order_with_comms
    with private.only_forward(made):
        kinds = [
            action.computation_type.value for actions in made.pipeline_order_with_comms.values() for action in actions
        ]
    assert kinds.count("F") == 8 * 8
    assert kinds.count("SEND_F") == kinds.count("RECV_F") == 8 * (7 - (name in V_SHAPED))
    assert set(kinds) <= {"F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"}
    assert made.pipeline_order_with_comms is before


def test_order_from_a_file(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    stages = [SimpleNamespace(stage_index=0, num_stages=2, group_size=2, group_rank=0, submod=nn.Identity())]
    made = private.schedule_from_csv(stages, 2, torch.add, path)
    assert list(private.compute_actions(made.pipeline_order[1])) == schedule.read_csv(path)[1]
    assert made.scale_grads is False
