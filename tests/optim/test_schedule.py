"""The learning rate is a pure function of the step."""

import pytest

from titanlite.config import from_dict
from titanlite.optim.schedule import lr_factor


def _factors(**schedule):
    steps = schedule.pop("steps", 10)
    config = from_dict({"training": {"steps": steps}, "lr_scheduler": schedule})
    return [lr_factor(step, config) for step in range(1, steps + 1)]


def test_warm_up_then_linear_decay():
    assert _factors(warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_stable_between_warm_up_and_decay():
    factors = _factors(warmup_steps=2, decay_ratio=0.4)
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.5), ("sqrt", 1 - 0.5**0.5), ("cosine", 0.5)])
def test_shape_half_way(shape, half):
    factors = _factors(warmup_steps=0, decay_type=shape, min_lr_factor=0.2)
    assert factors[0] == 1.0
    assert factors[5] == pytest.approx(0.2 + 0.8 * half)
    assert all(factor > 0.2 for factor in factors)


def test_a_longer_run_follows_a_fixed_schedule():
    assert _factors(warmup_steps=2, total_steps=10, steps=20)[:10] == _factors(warmup_steps=2, total_steps=10)
    assert _factors(warmup_steps=2, total_steps=10, steps=20, min_lr_factor=0.1)[-1] == pytest.approx(0.1)
