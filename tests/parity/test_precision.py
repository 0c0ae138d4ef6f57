"""Optimizers, precision and compile on several ranks against one process."""

import pytest
import torch

from tests.parity.layouts import Layout
from tests.parity.yardstick import difference, run, settings, together, weight_difference
from tests.worlds import ranks
from titanlite.config import from_dict
from titanlite.errors import UserError

DATA, TENSOR, BOTH, PIPELINE = Layout("dp2", 2), Layout("tp2"), Layout("dp2 tp2", 2), Layout("pp2")


def long(*values):
    """A case for ``--full``."""
    return pytest.param(*values, marks=pytest.mark.full)


def _named(layout):
    return layout.name


def _close(layout, alone, text, folder, steps, loss, norm, mutate=None, **tables):
    """As ``held``, with tolerances of its own for what rounds to few digits."""
    own = layout.tables()
    for name, values in tables.items():
        own[name] = own.get(name, {}) | values
    found = together(ranks(layout.size).run(run, settings(text, str(folder), steps, **own), mutate, True))
    expected = alone(steps, mutate, **tables)
    assert difference(found.loss, expected.loss) <= loss
    assert difference(found.norm, expected.norm) <= norm
    return found, expected


@pytest.mark.parametrize("layout", [DATA, TENSOR, long(BOTH), long(PIPELINE)], ids=_named)
def test_muon_orthogonalises_whole_matrices(layout, alone, text, tmp_path):
    # Its iteration computes in bfloat16. Pieces orthogonalised by themselves would be wrong by 30 times as much.
    muon = {"name": "Muon"}
    found, expected = _close(layout, alone, text, tmp_path, 4, 2e-3, 2e-2, optimizer=muon)
    assert weight_difference(found, expected) <= 1e-2
    assert difference(expected.loss, alone(4).loss) > 2e-2, "AdamW would pass for Muon"


@pytest.mark.parametrize("layout", [Layout("dp2", 4), Layout("tp2", 8), long(Layout("dp2 tp2", 4))], ids=_named)
def test_early_steps_on_every_layout_equal_late_ones(layout, alone, text, tmp_path):
    tables = layout.tables() | {"optimizer": {"early_step_in_backward": True}}
    tables["training"] |= {"max_norm": 0.0}
    found = together(ranks(layout.size).run(run, settings(text, str(tmp_path), 4, **tables), None, True))
    late = alone(4, training={"max_norm": 0.0})
    assert difference(found.loss, late.loss) <= 1e-5
    assert difference(found.norm, late.norm) <= 1e-4
    assert weight_difference(found, late) <= 1e-4


@pytest.mark.parametrize("layout", [DATA, long(TENSOR)], ids=_named)
def test_moments_in_bfloat16(layout, alone, text, tmp_path):
    _close(layout, alone, text, tmp_path, 4, 1e-3, 1e-2, optimizer={"state_dtype": "bfloat16"})


def with_a_scale_too_large(trainer):
    """Let the first steps overflow, and keep the scale and the number of given-up steps of each step."""
    trainer.state.loss_scale = 2.0**18
    judge = trainer.recovery.judge

    def and_keep(step, verdict, state):
        verdict_on_it = judge(step, verdict, state)
        trainer.curve.validation += [state.loss_scale, float(verdict_on_it == "skip")]
        return verdict_on_it

    trainer.recovery.judge = and_keep


@pytest.mark.parametrize("layout", [DATA, TENSOR, PIPELINE], ids=_named)
def test_all_ranks_move_the_loss_scale_alike(layout, alone, text, tmp_path):
    tables = layout.tables()
    tables["training"] |= {"mixed_precision_param": "float16"}
    values = settings(text, str(tmp_path), 12, **tables)
    found, *others = ranks(layout.size).run(run, values, with_a_scale_too_large)
    assert all(other.validation == found.validation for other in others)
    scales, skipped = found.validation[::2], found.validation[1::2]
    given_up = int(sum(skipped))
    assert 0 < given_up < 6 and not any(skipped[given_up:]), "overflows first, then steps"
    assert scales[-1] == 2.0 ** (18 - given_up)
    assert found.loss[-1] < found.loss[given_up] - 0.1


FLOAT8 = {"recipe_name": "tensorwise", "emulate": True}
GATHERED = FLOAT8 | {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}


@pytest.mark.parametrize(
    ("layout", "float8"),
    [
        long(DATA, FLOAT8),
        (DATA, GATHERED),
        (TENSOR, FLOAT8),
        long(TENSOR, FLOAT8 | {"recipe_name": "rowwise"}),
        long(BOTH, FLOAT8),
        long(PIPELINE, FLOAT8),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "-".join(map(str, value.values())),
)
def test_float8_is_close_to_one_process(layout, float8, alone, text, tmp_path):
    pytest.importorskip("torchao")
    tables = {"model": {"converters": ["float8"]}, "quantize": {"linear": {"float8": float8}}}
    own = layout.tables() | tables
    found = together(ranks(layout.size).run(run, settings(text, str(tmp_path), 3, **own)))
    exact = alone(3)
    assert 1e-5 < difference(found.loss, exact.loss) <= 5e-2
    assert difference(found.norm, exact.norm) <= 0.3


def counting_graphs(trainer):
    """Keep the number of graphs that have been compiled by the end of each step."""
    update = trainer.update
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def and_count(verdict):
        update(verdict)
        trainer.curve.validation.append(float(torch._dynamo.utils.counters["stats"]["unique_graphs"]))

    trainer.update = and_count


COMPILED = {"enable": True, "backend": "aot_eager"}
BY_OPERATION = {"mode": "selective", "selective_ac_option": "op"}


@pytest.mark.parametrize(
    ("layout", "tables"),
    [
        (DATA, {}),
        long(BOTH, {"activation_checkpoint": {"mode": "full"}}),
        (TENSOR, {"activation_checkpoint": BY_OPERATION}),
        long(PIPELINE, {"activation_checkpoint": BY_OPERATION}),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else str(value.get("activation_checkpoint", {})),
)
def test_nothing_is_compiled_after_the_second_step(layout, tables, alone, text, tmp_path):
    own = layout.tables() | tables | {"compile": COMPILED}
    values = settings(text, str(tmp_path), 5, **own)
    for found in ranks(layout.size).run(run, values, counting_graphs):
        graphs = found.validation
        assert graphs[-1] == graphs[1] > 0
        assert difference(found.loss, alone(5).loss) <= 1e-5
        assert difference(found.norm, alone(5).norm) <= 1e-4


def test_a_memory_budget_goes_with_every_layout_but_tensor_parallelism(alone, text, tmp_path):
    own = DATA.tables() | {
        "compile": {"enable": True, "components": ["model"], "backend": "aot_eager_decomp_partition"},
        "activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.5},
    }
    found = together(ranks(DATA.size).run(run, settings(text, str(tmp_path), 3, **own)))
    assert difference(found.loss, alone(3).loss) <= 1e-5
    assert difference(found.norm, alone(3).norm) <= 1e-4
    with pytest.raises(UserError, match=r"memory_budget.*selective or full"):
        from_dict(settings(text, str(tmp_path), 3, **own | TENSOR.tables()), world_size=2)


@pytest.mark.parametrize("layout", [DATA, long(TENSOR), PIPELINE], ids=_named)
def test_a_chunked_loss_on_several_ranks(layout, alone, text, tmp_path):
    own = layout.tables()
    own["training"] |= {"loss_chunks": 5}
    found = together(ranks(layout.size).run(run, settings(text, str(tmp_path), 3, **own)))
    assert difference(found.loss, alone(3).loss) <= 1e-5
    assert difference(found.norm, alone(3).norm) <= 1e-4
