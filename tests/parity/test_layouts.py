"""One run, any layout: the loss curve, the gradient norms and the final weights are those of one process."""

from dataclasses import replace

import pytest
import torch

from tests.parity.layouts import COVERING, FULL, RING, THREE, Layout
from tests.parity.yardstick import FULL_STEPS, LOSS, NORM, STEPS, difference, run, settings, together, weight_difference
from tests.worlds import ranks
from titanlite.data.batch import Batch

BF16 = {"mixed_precision_param": "bfloat16"}


def held(layout: Layout, alone, text, folder, steps=STEPS, mutate=None, **tables):
    """Run ``layout`` and compare it with one process."""
    own = layout.tables()
    for name, values in tables.items():
        own[name] = own.get(name, {}) | values
    found = together(ranks(layout.size).run(run, settings(text, str(folder), steps, **own), mutate, True))
    expected = alone(steps, mutate, **tables)
    assert difference(found.loss, expected.loss) <= LOSS
    assert difference(found.norm, expected.norm) <= NORM
    assert weight_difference(found, expected) <= NORM
    return found, expected


@pytest.mark.parametrize("layout", COVERING, ids=str)
def test_layout_equals_one_process(layout, alone, text, tmp_path):
    _, expected = held(layout, alone, text, tmp_path)
    # Else the comparison would be weak: the text is learnt and every step is clipped.
    assert expected.loss[-1] < expected.loss[0] - 0.3
    assert min(expected.norm) > 1.0


@pytest.mark.full
@pytest.mark.parametrize("layout", [*COVERING, *FULL], ids=str)
def test_layout_equals_one_process_over_twenty_steps(layout, alone, text, tmp_path):
    held(layout, alone, text, tmp_path, FULL_STEPS)


def with_documents(trainer):
    """Let a document begin at every sixteenth letter: rows of several, at places that the layout has no part in."""
    inner = trainer.runner.forward_backward

    def kept_apart(batch, scale):
        return inner(replace(batch, documents=(batch.tokens % 16 == 0).long().cumsum(1)), scale)

    trainer.runner.forward_backward = kept_apart


@pytest.mark.parametrize("layout", [Layout("cp2"), Layout("cp2", keys=RING), Layout("cp2 pp2", 4)], ids=str)
def test_documents_stay_apart_and_travel_with_their_micro_batch(layout, alone, text, tmp_path):
    _, expected = held(layout, alone, text, tmp_path, mutate=with_documents)
    assert difference(expected.loss, alone().loss) > 10 * LOSS, "the mask changes nothing"


def test_whole_logits_give_the_same_loss(alone, text, tmp_path):
    held(Layout("tp2", keys={"disable_loss_parallel": True}), alone, text, tmp_path)


def test_tied_embeddings_stay_tied_when_cut(alone, text, tmp_path):
    found, _ = held(Layout("tp2"), alone, text, tmp_path, model={"tie_embeddings": True})
    assert ("output.weight" in found.weights) == ("output.weight" in alone(model={"tie_embeddings": True}).weights)
    held(Layout("dp2", 2), alone, text, tmp_path, model={"tie_embeddings": True})


def test_norms_of_queries_and_keys_are_cut_by_heads(alone, text, tmp_path):
    held(Layout("tp2"), alone, text, tmp_path, model={"name": "qwen3", "tie_embeddings": False})


def with_evaluation(trainer):
    """Every second step evaluate five rows twice as long as the training's: the pipeline pads them to its rounds."""
    update = trainer.update

    def and_evaluate(verdict):
        update(verdict)
        if len(trainer.curve.loss) % 2:
            generator = torch.Generator().manual_seed(len(trainer.curve.loss))
            rows = torch.randint(48, 112, (5, 65), generator=generator)
            loss = trainer.runner.evaluate(Batch(rows[:, :-1], rows[:, 1:])).double()
            if not trainer.mesh.is_first_of("tp"):
                loss.zero_()
            if trainer.world.size > 1:
                torch.distributed.all_reduce(loss)
            trainer.curve.validation.append(float(loss))

    trainer.update = and_evaluate


SOME = [
    Layout("pp2"),
    Layout("pp2", 4, schedule="LoopedBFS"),
    Layout("pp2", 4, schedule="ZBVZeroBubble"),
    Layout("tp2"),
]
REST = ["Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"]


@pytest.mark.parametrize(
    "layout",
    [
        *SOME,
        *(pytest.param(Layout("pp2", 4, schedule=name), marks=pytest.mark.full) for name in REST),
        pytest.param(Layout("cp2"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_evaluation_between_steps_gives_the_same_loss(layout, alone, text, tmp_path):
    found, expected = held(layout, alone, text, tmp_path, mutate=with_evaluation)
    assert len(expected.validation) == STEPS // 2
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


@pytest.mark.parametrize("layout", [Layout("dp2", 2), Layout("tp2"), Layout("cp2"), Layout("pp2")], ids=str)
def test_bf16_is_within_its_own_noise(layout, alone, text, tmp_path):
    loss, norm = noise(alone)
    tables = layout.tables()
    tables["training"] |= BF16
    found = together(ranks(layout.size).run(run, settings(text, str(tmp_path), **tables)))
    exact = alone()
    assert 1e-5 < difference(found.loss, exact.loss) <= 2 * loss
    assert difference(found.norm, exact.norm) <= 2 * norm


@pytest.mark.full
@pytest.mark.parametrize("layout", [*COVERING[4:], *THREE], ids=str)
def test_bf16_is_within_its_own_noise_everywhere(layout, alone, text, tmp_path):
    test_bf16_is_within_its_own_noise(layout, alone, text, tmp_path)
