"""One run, any layout: the loss curve, the gradient norms and the final weights are those of one process."""

import pytest

from tests.parity.layouts import COVERING, FULL, THREE, Layout
from tests.parity.yardstick import FULL_STEPS, LOSS, NORM, STEPS, difference, run, settings, together, weight_difference
from tests.worlds import ranks

BF16 = {"mixed_precision_param": "bfloat16"}


def held(layout: Layout, alone, text, folder, steps=STEPS, **tables):
    """Run ``layout`` and compare it with one process."""
    own = layout.tables()
    for name, values in tables.items():
        own[name] = own.get(name, {}) | values
    found = together(ranks(layout.size).run(run, settings(text, str(folder), steps, **own), None, True))
    expected = alone(steps, **tables)
    assert difference(found.loss, expected.loss) <= LOSS
    assert difference(found.norm, expected.norm) <= NORM
    assert weight_difference(found, expected) <= NORM
    return found, expected


@pytest.mark.parametrize("layout", COVERING, ids=lambda layout: layout.name)
def test_layout_equals_one_process(layout, alone, text, tmp_path):
    _, expected = held(layout, alone, text, tmp_path)
    # Else the comparison would be weak: the text is learnt and every step is clipped.
    assert expected.loss[-1] < expected.loss[0] - 0.3
    assert min(expected.norm) > 1.0


@pytest.mark.full
@pytest.mark.parametrize("layout", [*COVERING, *FULL], ids=lambda layout: layout.name)
def test_layout_equals_one_process_over_twenty_steps(layout, alone, text, tmp_path):
    held(layout, alone, text, tmp_path, FULL_STEPS)


DOCUMENTS = {"training": {"document_mask": True}}


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_documents_stay_apart_under_context_parallelism(rotation, alone, text, tmp_path):
    layout = Layout("cp2", keys={"context_parallel_rotate_method": rotation})
    _, expected = held(layout, alone, text, tmp_path, **DOCUMENTS)
    assert difference(expected.loss, alone().loss) > 10 * LOSS, "the mask changes nothing"


def test_documents_travel_through_the_pipeline_with_their_micro_batch(alone, text, tmp_path):
    held(Layout("cp2 pp2", 4), alone, text, tmp_path, **DOCUMENTS)


def test_whole_logits_give_the_same_loss(alone, text, tmp_path):
    held(Layout("tp2", keys={"disable_loss_parallel": True}), alone, text, tmp_path)


def test_tied_embeddings_stay_tied_when_cut(alone, text, tmp_path):
    found, _ = held(Layout("tp2"), alone, text, tmp_path, model={"tie_embeddings": True})
    assert ("output.weight" in found.weights) == ("output.weight" in alone(model={"tie_embeddings": True}).weights)
    held(Layout("dp2", 2), alone, text, tmp_path, model={"tie_embeddings": True})


def test_qwen_norms_of_heads_are_cut(alone, text, tmp_path):
    held(Layout("tp2"), alone, text, tmp_path, model={"name": "qwen3", "tie_embeddings": False})


@pytest.mark.parametrize(
    "layout", [Layout("pp2", 4, schedule="ZBVZeroBubble"), Layout("pp2"), Layout("tp2")], ids=lambda layout: layout.name
)
def test_validation_loss_is_the_same(layout, alone, text, tmp_path):
    # Five rows in batches of two: the last batch is short, and the rows of the pipeline's rounds are padded.
    validation = {
        "enable": True,
        "dataset": "jsonl",
        "dataset_path": text,
        "seq_len": 64,
        "local_batch_size": 3,
        "freq": 2,
        "steps": 2,
    }
    found, expected = held(layout, alone, text, tmp_path, validation=validation)
    assert len(expected.validation) == 3
    assert difference(found.validation, expected.validation) <= LOSS


def test_own_order_in_a_file(alone, text, tmp_path):
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1I0,1F1,1I1,1W0,1W1,1F2,1B2,1F3,1B3\n")
    held(Layout("pp2", keys={"pipeline_parallel_schedule_csv": str(path)}), alone, text, tmp_path)


def test_own_stages(alone, text, tmp_path):
    parts = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "output"]]
    held(Layout("pp2", keys={"module_fqns_per_model_part": parts}), alone, text, tmp_path)


def noise(alone):
    """How far one process in bf16 is from itself in fp32, over ways of working that differ in nothing but rounding."""
    exact = alone()
    runs = [
        alone(training=BF16 | {"local_batch_size": rows, "loss_chunks": chunks})
        for rows, chunks in ((8, 1), (2, 1), (1, 4))
    ]
    return max(difference(r.loss, exact.loss) for r in runs), max(difference(r.norm, exact.norm) for r in runs)


@pytest.mark.parametrize(
    "layout",
    [Layout("dp2", 2), Layout("tp2"), Layout("cp2"), Layout("pp2"), Layout("pp2", schedule="ZBVZeroBubble")],
    ids=lambda layout: layout.name,
)
def test_bf16_is_within_its_own_noise(layout, alone, text, tmp_path):
    loss, norm = noise(alone)
    tables = layout.tables()
    tables["training"] |= BF16
    found = together(ranks(layout.size).run(run, settings(text, str(tmp_path), **tables)))
    exact = alone()
    assert 1e-5 < difference(found.loss, exact.loss) <= 2 * loss
    assert difference(found.norm, exact.norm) <= 2 * norm


@pytest.mark.full
@pytest.mark.parametrize("layout", [*COVERING[-7:], *THREE], ids=lambda layout: layout.name)
def test_bf16_is_within_its_own_noise_everywhere(layout, alone, text, tmp_path):
    test_bf16_is_within_its_own_noise(layout, alone, text, tmp_path)
