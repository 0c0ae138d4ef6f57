"""Pipelines on paper: stages, placement, order, bubble."""

from types import SimpleNamespace

import pytest

from titanlite.errors import UserError
from titanlite.parallel import schedule


def keys(**given):
    defaults = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_layers_per_stage": None,
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "pipeline_parallel_microbatch_size": 1,
        "module_fqns_per_model_part": None,
    }
    return SimpleNamespace(**(defaults | given))


def config(**given):
    return SimpleNamespace(parallelism=keys(**given), training=SimpleNamespace(local_batch_size=4))


def lengths(n_layers, **given):
    stages = schedule.stage_modules(config(**given), n_layers)
    return [sum(name.startswith("layers.") for name in names) for names in stages]


@pytest.mark.parametrize(
    ("n_layers", "given", "expected"),
    [
        (4, {}, [2, 2]),
        (5, {}, [3, 2]),
        (6, {"pipeline_parallel_degree": 4}, [1, 2, 2, 1]),
        (6, {"pipeline_parallel_degree": 4, "pipeline_parallel_first_stage_less_layers": 0}, [2, 2, 2, 0]),
        (6, {"pipeline_parallel_schedule": "Interleaved1F1B"}, [1, 2, 2, 1]),
        (
            6,
            {"pipeline_parallel_schedule": "Interleaved1F1B", "pipeline_parallel_layers_per_stage": 1},
            [0, 1, 1, 1, 1, 1, 1, 0],
        ),
        (126, {"pipeline_parallel_degree": 16}, [7] + [8] * 14 + [7]),
    ],
)
def test_stages_are_even_when_the_ends_count_their_tables(n_layers, given, expected):
    assert lengths(n_layers, **given) == expected


def test_every_module_is_in_one_stage():
    stages = schedule.stage_modules(config(pipeline_parallel_schedule="interleaved1f1b"), 4)
    assert [name for names in stages for name in names] == [
        "tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "output"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_parallel_schedule": "2F2B"}, "2F2B.*1F1B, GPipe"),
        ({"pipeline_parallel_layers_per_stage": 2}, "3 pipeline stages"),
        ({"pipeline_parallel_layers_per_stage": 1, "pipeline_parallel_degree": 3}, "1 stage on each rank"),
        (
            {"pipeline_parallel_schedule": "ZBVZeroBubble", "pipeline_parallel_layers_per_stage": 1},
            "2 stages on each rank",
        ),
        ({"pipeline_parallel_degree": 8}, "4 layers do not make 8"),
        ({"module_fqns_per_model_part": [["tok_embeddings"], ["norm", "output"]]}, "every module once"),
        ({"pipeline_parallel_schedule_csv": "no/such/file"}, "no/such/file"),
    ],
)
def test_stages_that_cannot_be_are_refused_by_name(given, message):
    with pytest.raises(UserError, match=message):
        schedule.stage_modules(config(**given), 4)


def test_own_stages():
    own = [["tok_embeddings", "layers.0", "layers.1", "layers.2"], ["layers.3", "norm", "output"]]
    assert schedule.stage_modules(config(module_fqns_per_model_part=own), 4) == own


def test_micro_batches_must_divide_the_batch():
    assert schedule.micro_batches(config(pipeline_parallel_microbatch_size=2)) == 2
    with pytest.raises(UserError, match=r"local_batch_size = 4 .*microbatch_size = 3"):
        schedule.micro_batches(config(pipeline_parallel_microbatch_size=3))


def test_placement():
    loop = keys(pipeline_parallel_schedule="Interleaved1F1B")
    assert [schedule.stages_of(rank, 4, loop) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert schedule.rank_of_loss(4, loop) == 1
    v = keys(pipeline_parallel_schedule="ZBVZeroBubble")
    assert [schedule.stages_of(rank, 4, v) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert schedule.rank_of_loss(4, v) == 0


@pytest.mark.parametrize("name", schedule.ONE_STAGE)
@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 3)])
def test_bubble_of_one_stage_a_rank_is_the_closed_form(name, ranks, micros):
    order = schedule.one_stage_order(name, ranks, micros)
    assert schedule.bubble(order) == pytest.approx((ranks - 1) / (micros + ranks - 1))


def test_an_order_that_waits_for_itself_is_told():
    order = {0: [schedule.Action(0, "B", 0), schedule.Action(0, "F", 0)], 1: [schedule.Action(1, "F", 0)]}
    with pytest.raises(UserError, match="waits for itself: rank 0 at 0B0"):
        schedule.bubble(order)


def test_csv(tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1I1,1W1\n")
    order = schedule.read_csv(path)
    assert order[1] == [(1, "F", 0), (1, "F", 1), (1, "B", 0), (1, "I", 1), (1, "W", 1)]
    path.write_text("0F0,sleep\n")
    with pytest.raises(UserError, match="line 1: 'sleep' is not an action"):
        schedule.read_csv(path)
