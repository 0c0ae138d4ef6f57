"""The yardstick can tell: each of the mistakes that parallel training is prone to stands out by ten times the tolerance.

A tolerance is only as good as what it would catch. The mistakes are made on purpose, most on one process; the loss *or*
the gradient norm must show each, as a parity test looks at both.
"""

from dataclasses import replace

import pytest
import torch

from tests.parity.layouts import Layout
from tests.parity.yardstick import LOSS, NORM, STEPS, difference, run, settings, together
from tests.worlds import ranks
from titanlite.optim import gradients

SEQ = 32


def attention_off(trainer):
    for block in trainer.parts[0].layers.values():
        block.attention.kernel.forward = lambda q, k, v, documents=None: torch.zeros_like(q)


def halves_blind(trainer):
    """Each half of the sequence sees itself alone, as if context parallelism did not communicate."""
    for block in trainer.parts[0].layers.values():
        whole = type(block.attention.kernel).forward
        kernel = block.attention.kernel

        def blind(q, k, v, documents=None, kernel=kernel, whole=whole):
            halves = zip(*(x.chunk(2, dim=2) for x in (q, k, v)), strict=True)
            return torch.cat([whole(kernel, *half) for half in halves], dim=2)

        kernel.forward = blind


def local_positions(trainer):
    """Each half of the sequence counts its positions from 0."""
    inner = trainer.runner.forward_backward

    def shifted(batch, scale):
        positions = (torch.arange(SEQ) % (SEQ // 2)).expand(len(batch.tokens), -1)
        return inner(replace(batch, positions=positions), scale)

    trainer.runner.forward_backward = shifted


def layer_skipped(trainer):
    trainer.parts[0].layers["2"].forward = lambda x, positions=None, documents=None: x


def layers_swapped(trainer):
    layers = trainer.parts[0].layers
    first, second = layers["1"], layers["2"]
    layers["1"], layers["2"] = second, first


def gradients_doubled(trainer):
    inner = trainer.runner.forward_backward
    trainer.runner.forward_backward = lambda batch, scale: inner(batch, 2 * scale)


def one_row_of_another_rank(trainer):
    """The rows of the second data-parallel rank are the first one's."""
    inner = trainer.runner.forward_backward

    def twice(batch, scale):
        return inner(
            type(batch)(*(torch.cat([t[:4], t[:4]]) if t is not None else None for t in batch._tensors())), scale
        )

    trainer.runner.forward_backward = twice


def one_row_too_few(trainer):
    """One row's gradient is lost, its loss is not."""
    inner = trainer.runner.forward_backward

    def short(batch, scale):
        return inner(batch.rows(slice(0, 7)), scale) + trainer.runner.evaluate(batch.rows(slice(7, 8)))

    trainer.runner.forward_backward = short


CODE = [
    attention_off,
    halves_blind,
    local_positions,
    layer_skipped,
    layers_swapped,
    gradients_doubled,
    one_row_of_another_rank,
    one_row_too_few,
]

SETTINGS = {
    "learning rate 1 % off": {"optimizer": {"lr": 3e-3 * 1.01, "eps": 1e-6}},
    "no weight decay": {"optimizer": {"weight_decay": 0.0}},
    "no clipping": {"training": {"max_norm": 0}},
    "another seed": {"debug": {"seed": 1}},
}


def caught(found, expected):
    """By how many tolerances the worse of loss and norm is off."""
    return max(difference(found.loss, expected.loss) / LOSS, difference(found.norm, expected.norm) / NORM)


@pytest.mark.parametrize("mutant", CODE, ids=lambda mutant: mutant.__name__)
def test_wrong_code_is_caught(mutant, alone, text, tmp_path):
    assert caught(run(settings(text, str(tmp_path)), mutant), alone()) >= 10


@pytest.mark.parametrize("name", SETTINGS)
def test_wrong_settings_are_caught(name, alone, text, tmp_path):
    assert caught(run(settings(text, str(tmp_path), **SETTINGS[name])), alone()) >= 10


def norms_not_summed(trainer):
    """Tensor parallelism: each rank keeps the norms' gradients of its own share of the sequence."""
    trainer.runner.finish = None


def divided_by_micro_batches(trainer):
    """Pipeline: torch's own scaling of the gradients is left on."""
    inner = trainer.runner._schedule

    def scaling(seq_len):
        plan, stages = inner(seq_len)
        plan.scale_grads = True
        return plan, stages

    trainer.runner._schedule = scaling


def own_norm_only(trainer):
    """Pipeline: each rank clips by the norm of its own stages."""
    whole = trainer.update

    def clipped(verdict):
        squares = gradients.square_norm(trainer.optimizers.parameters(), 1)
        whole(replace(verdict, grad_norm=float(squares) ** 0.5))

    trainer.update = clipped


@pytest.mark.parametrize(
    ("mutant", "layout", "steps"),
    [
        # Copies of a norm that drift apart need some steps to show.
        (norms_not_summed, Layout("tp2"), 10),
        (divided_by_micro_batches, Layout("pp2"), STEPS),
        (own_norm_only, Layout("pp2"), STEPS),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_parallel_code_is_caught(mutant, layout, steps, alone, text, tmp_path):
    found = together(ranks(layout.size).run(run, settings(text, str(tmp_path), steps, **layout.tables()), mutant))
    assert caught(found, alone(steps)) >= 10
