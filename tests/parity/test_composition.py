"""Layouts together with what else a run may ask for."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parity.layouts import RING, Layout, micro
from tests.parity.test_layouts import held
from tests.parity.yardstick import run, settings
from tests.worlds import ranks

TP_PP = Layout("tp2 pp2", 4, micro(2))


@pytest.mark.parametrize(
    ("implementation", "layout"),
    [
        ("foreach", Layout("tp2")),
        ("foreach", TP_PP),
        ("for-loop", Layout("pp2")),
        ("for-loop", Layout("dp2 tp2", 2)),
        *(
            pytest.param(name, layout, marks=pytest.mark.full)
            for name in ("foreach", "for-loop")
            for layout in (Layout("dp2", 2), Layout("cp2"), Layout("dp2 pp2", 2), Layout("tp2 cp2"))
        ),
    ],
    ids=str,
)
def test_every_implementation_of_the_optimizer_takes_every_layout(implementation, layout, alone, text, tmp_path):
    tables = layout.tables() | {"optimizer": {"implementation": implementation}}
    found = ranks(layout.size).run(run, settings(text, str(tmp_path), 2, **tables))
    expected = alone(2)  # fused
    for curve in found:
        np.testing.assert_allclose(curve.loss, expected.loss, rtol=1e-5)
        np.testing.assert_allclose(curve.norm, expected.norm, rtol=1e-4)


def _copies(values):
    """This rank's own copy of every weight that is whole on it, and moments of the same, after a run."""
    kept = {}

    def remember(trainer):
        update = trainer.update

        def and_look(verdict):
            update(verdict)
            kept.clear()
            for name, parameter in trainer.optimizers.named.items():
                if "norm" in name:
                    state = trainer.optimizers.named_state()[f"{name}.exp_avg"]
                    for what, tensor in (("weight", parameter), ("moment", state)):
                        assert isinstance(tensor, DTensor)
                        kept[f"{name} {what}"] = tensor.to_local().detach().clone().numpy()

        trainer.update = and_look

    run(values, remember)
    return kept


@pytest.mark.parametrize("layout", [Layout("tp2"), Layout("dp2 tp2", 2)], ids=lambda layout: layout.name)
def test_copies_of_a_norm_stay_equal_to_the_bit(layout, text, tmp_path):
    found = ranks(layout.size).run(_copies, settings(text, str(tmp_path), **layout.tables()))
    for rank in range(0, layout.size, 2):  # tp is innermost: neighbours hold the same
        assert len(found[rank]) == 2 * 9
        for name, copy in found[rank].items():
            assert np.array_equal(copy, found[rank + 1][name]), name
            assert np.isfinite(copy).all()
            assert "weight" not in name or copy.std() > 0


def test_offload_to_cpu_memory(alone, text, tmp_path):
    held(Layout("dp2", 2), alone, text, tmp_path, 3, training={"enable_cpu_offload": True})


@pytest.mark.parametrize(
    ("reshard", "schedule"), [("always", "1F1B"), ("always", "LoopedBFS"), ("never", "ZBVZeroBubble")]
)
def test_resharding_changes_nothing(reshard, schedule, alone, text, tmp_path):
    layout = Layout("dp2 pp2", 2, {"fsdp_reshard_after_forward": reshard}, schedule)
    held(layout, alone, text, tmp_path, 3)


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("op", Layout("tp2")),
        ("op", Layout("cp2")),
        ("op", Layout("pp2")),
        ("2", Layout("cp2", keys=RING)),
        ("2", Layout("pp2", 4, schedule="ZBVZeroBubble")),
    ],
    ids=str,
)
def test_recomputed_activations(option, layout, alone, text, tmp_path):
    recompute = {"mode": "selective", "selective_ac_option": option}
    held(layout, alone, text, tmp_path, 3, activation_checkpoint=recompute)


@pytest.mark.parametrize(
    "layout",
    [
        Layout("tp2", keys={"disable_loss_parallel": True}),
        Layout("pp2", 4, schedule="InterleavedZeroBubble"),
        pytest.param(Layout("tp2"), marks=pytest.mark.full),
        pytest.param(Layout("cp2", keys=RING), marks=pytest.mark.full),
        pytest.param(Layout("dp2 tp2", 2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_compiled_blocks(layout, alone, text, tmp_path):
    torch._dynamo.reset()
    held(layout, alone, text, tmp_path, 3, compile={"enable": True, "backend": "aot_eager"})
