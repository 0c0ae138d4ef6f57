"""The optimizers against torch's plain ones, their state before the first step, and the loss scale."""

import math

import pytest
import torch
from torch import nn

from titanlite.config import from_dict
from titanlite.optim import gradients
from titanlite.optim.loss_scale import GROWTH_INTERVAL, LossScale
from titanlite.optim.optimizer import Optimizers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(7, 8)
        self.layers = nn.ModuleDict({"0": nn.Linear(8, 6, bias=False)})
        self.norm = nn.RMSNorm(6)

    def forward(self, x):
        # Far from a norm's invariances, where Adam would follow the sign of rounding errors.
        target = torch.linspace(-2, 2, 42).view(7, 6).sin()
        return (self.norm(self.layers["0"](self.tok_embeddings(x))) - target).pow(4).sum()


def _train(steps=5, snapshot_first=False, **optimizer):
    model = Model()
    config = from_dict({"optimizer": {"lr": 0.05, **optimizer}, "training": {"max_norm": 0.0}})
    optimizers = Optimizers([model], config)
    if snapshot_first:
        assert all(state.item() == 0 for name, state in optimizers.named_state().items() if name.endswith("step"))
    for _ in range(steps):
        optimizers.begin(1.0)
        model(torch.arange(7)).backward()
        optimizers.step()
    return model, optimizers


def _reference(steps=5, decay_embeddings=True):
    model = Model()
    decayed = [model.layers["0"].weight] + [model.tok_embeddings.weight] * decay_embeddings
    still = [p for p in model.parameters() if all(p is not d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(7)).backward()
        optimizer.step()
    return model


def _assert_equal(model, other, rtol=1e-5, atol=1e-6):
    for (name, ours), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("snapshot_first", [False, True])
def test_adamw_is_torchs_and_asking_for_its_state_changes_nothing(implementation, snapshot_first):
    model, optimizers = _train(implementation=implementation, snapshot_first=snapshot_first)
    _assert_equal(model, _reference())
    steps = {state.item() for name, state in optimizers.named_state().items() if name.endswith(".step")}
    assert steps == {5.0}


def test_embeddings_may_be_kept_from_decay():
    _assert_equal(_train(decay_embeddings=False)[0], _reference(decay_embeddings=False))


def test_early_steps_equal_late_ones():
    model, optimizers = _train(early_step_in_backward=True)
    _assert_equal(model, _reference())
    assert all(p.grad is None for p in model.parameters())
    optimizers.begin(1.0)
    model(torch.arange(7)).backward()
    early = optimizers.square_norm(1)
    late = _reference()
    late.zero_grad()
    late(torch.arange(7)).backward()
    assert early.item() == pytest.approx(gradients.square_norm(late.parameters(), 1).item(), rel=1e-4)


def test_bfloat16_moments_are_close_and_half_as_large():
    model, optimizers = _train(state_dtype="bfloat16")
    _assert_equal(model, _reference(), rtol=2e-2, atol=2e-2)
    kinds = {name.rsplit(".", 1)[1]: state.dtype for name, state in optimizers.named_state().items()}
    assert kinds == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    model, optimizers = _train(name="Muon")
    state = optimizers.named_state()
    assert "layers.0.weight.momentum_buffer" in state and "layers.0.weight.exp_avg" not in state
    assert "tok_embeddings.weight.exp_avg" in state and "norm.weight.exp_avg" in state
    reference = Model()
    muon = torch.optim.Muon(
        [reference.layers["0"].weight], lr=0.05, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    rest = torch.optim.AdamW([reference.tok_embeddings.weight], lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
    norm = torch.optim.AdamW([reference.norm.weight], lr=0.05, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(5):
        reference.zero_grad()
        reference(torch.arange(7)).backward()
        muon.step(), rest.step(), norm.step()
    _assert_equal(model, reference)


class State:
    loss_scale, good_steps = 8.0, 0


def test_the_loss_scale_halves_at_overflow_and_doubles_after_good_steps():
    scale, state = LossScale(True), State()
    assert scale.overflowed(state, 1.0, math.inf) and state.loss_scale == 4.0
    for _ in range(GROWTH_INTERVAL):
        assert not scale.overflowed(state, 1.0, 1.0)
    assert state.loss_scale == 8.0


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale():
    state = State()
    assert not LossScale(True).overflowed(state, math.nan, math.nan) and state.loss_scale == 8.0
    assert not LossScale(False).overflowed(state, 1.0, math.inf)


def test_clipping_scales_to_the_limit():
    assert gradients.clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-5)
    assert gradients.clip_factor(0.5, 1.0) == 1.0
    assert gradients.clip_factor(100.0, 0.0) == 1.0
