"""Activation checkpointing, chunked loss, compile and precision against the plain model, in one process."""

from types import SimpleNamespace

import pytest
import torch

from titanlite.config import from_dict
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.world import World
from titanlite.errors import UserError
from titanlite.models import loss
from titanlite.parallel import activation_checkpoint
from titanlite.parallel.apply import parallelize

MODEL = {"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "init_std": 0.15}


@pytest.fixture(scope="module")
def world():
    started = World.start(from_dict({}).comm)
    yield started
    started.close()


def _build(world, **tables):
    values = {
        "model": MODEL | tables.pop("model", {}),
        "training": {"seq_len": 32, "mixed_precision_param": "float32"} | tables.pop("training", {}),
        "activation_checkpoint": {"mode": "none"},
        **tables,
    }
    config = from_dict(values)
    return parallelize(config, Mesh.build(config, world), world.device)


def _run(built):
    """Loss and gradients by name, on the same tokens every time."""
    from titanlite.data.batch import Batch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(320, (2, 33), generator=generator)
    total = built.runner.forward_backward(Batch(tokens[:, :-1], tokens[:, 1:]), 1 / 64)
    return total.item(), {name: p.grad for name, p in built.parts[0].named_parameters()}


@pytest.fixture(scope="module")
def plain(world):
    return _run(_build(world))


AC = [
    {"mode": "full"},
    {"mode": "full", "early_stop": True},
    {"mode": "full", "debug": True},
    {"mode": "full", "preserve_rng_state": False, "determinism_check": "none"},
    {"mode": "selective", "selective_ac_option": "2"},
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "selective", "selective_ac_option": "op", "per_op_sac_force_recompute_mm_shapes_by_fqns": ["w2"]},
]


@pytest.mark.parametrize("settings", AC, ids=str)
def test_activation_checkpointing_changes_no_bit(world, plain, settings):
    total, grads = _run(_build(world, activation_checkpoint=settings))
    assert total == plain[0]
    assert grads.keys() == plain[1].keys()
    assert all(torch.equal(grads[name], plain[1][name]) for name in grads)


def _matmuls(world, settings):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.mm = self.attention = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.mm += func is torch.ops.aten.mm.default
            self.attention += "scaled_dot_product" in str(func) and "backward" not in str(func)
            return func(*args, **(kwargs or {}))

    built = _build(world, activation_checkpoint=settings)
    with Count() as count:
        _run(built)
    return count.mm, count.attention


def test_what_is_recomputed_is_what_the_policy_says(world):
    kept, attention = _matmuls(world, {"mode": "none"})
    # early_stop off: a block's 7 matmuls and its attention run again.
    assert _matmuls(world, {"mode": "full"}) == (kept + 4 * 7, 2 * attention)
    assert _matmuls(world, {"mode": "selective", "selective_ac_option": "2"}) == (kept + 2 * 7, attention + 2)
    # Every other of 7 matmuls, but none of the feed-forward's: wk and wo run again; attention never does.
    operations = {"mode": "selective", "selective_ac_option": "op"}
    assert _matmuls(world, operations) == (kept + 4 * 2, attention)
    # w2, told to be recomputed, takes its turn from nobody.
    forced = {"per_op_sac_force_recompute_mm_shapes_by_fqns": ["w2"]}
    assert _matmuls(world, operations | forced) == (kept + 4 * 3, attention)


@pytest.mark.parametrize("flavor", ["debugmodel", "1B", "8B", "70B"])
def test_the_policy_by_operation_recomputes_under_a_fifth_of_the_forward_flops(flavor):
    from torch.utils.checkpoint import CheckpointPolicy

    from titanlite.models.block import Block
    from titanlite.models.sizes import sizes_of

    with torch.device("meta"):
        block = Block(sizes_of(from_dict({"model": {"flavor": flavor}}).model))
    shares = dict(activation_checkpoint.matmul_shares(block, []))
    context = SimpleNamespace(is_recompute=False)
    policy = activation_checkpoint._policy(shares)
    again = total = 0
    for module in (m for m in block.modules() if isinstance(m, torch.nn.Linear)):
        weight = module.weight.t()
        verdict = policy(context, torch.ops.aten.mm.default, None, weight)
        total += weight.numel()
        again += weight.numel() * (verdict == CheckpointPolicy.PREFER_RECOMPUTE)
    assert 0.05 < again / total < 0.2


@pytest.mark.parametrize("chunks", [2, 3, 64])
def test_chunked_loss_equals_the_plain_one(world, plain, chunks):
    total, grads = _run(_build(world, training={"loss_chunks": chunks}))
    assert total == pytest.approx(plain[0], rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain[1][name], rtol=1e-4, atol=1e-6)


def test_chunked_loss_never_holds_more_than_a_chunk_of_logits():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == 1000:
                self.rows = max(self.rows, out.shape[0])
            return out

    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    labels = torch.randint(1000, (64,))
    with Largest() as largest:
        loss.cross_entropy_sum(hidden, weight, labels, chunks=8).backward()
    assert largest.rows == 8


def test_ignored_labels_count_nothing_in_any_chunking():
    hidden, weight = torch.randn(12, 8), torch.randn(50, 8)
    labels = torch.randint(50, (12,))
    labels[::2] = loss.IGNORED
    expected = loss.cross_entropy_sum(hidden[1::2], weight, labels[1::2], chunks=1)
    for chunks in (1, 4, 12):
        torch.testing.assert_close(loss.cross_entropy_sum(hidden, weight, labels, chunks), expected)
    assert loss.cross_entropy_sum(hidden, weight, torch.full((12,), loss.IGNORED), chunks=3).item() == 0.0


def test_tied_embeddings_get_both_gradients(world):
    tied = _build(world, model={"tie_embeddings": True})
    _, grads = _run(tied)
    _, chunked = _run(_build(world, model={"tie_embeddings": True}, training={"loss_chunks": 4}))
    assert "output.weight" not in grads
    torch.testing.assert_close(chunked["tok_embeddings.weight"], grads["tok_embeddings.weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "ac", [{"mode": "none"}, {"mode": "full"}, {"mode": "selective", "selective_ac_option": "op"}], ids=str
)
def test_compiled_blocks_equal_eager_ones_and_compile_once(world, plain, ac):
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    built = _build(world, compile={"enable": True, "backend": "aot_eager"}, activation_checkpoint=ac)
    total, grads = _run(built)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    built.parts[0].zero_grad()
    _run(built)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled <= 2
    assert total == pytest.approx(plain[0], rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_memory_budget_keeps_less_and_changes_no_number(world, plain, budget):
    import torch._dynamo

    torch._dynamo.reset()
    # min-cut partitioning without code generation
    compiled = {"enable": True, "components": ["model"], "backend": "aot_eager_decomp_partition"}
    kept = {}
    for share in (1.0, budget):
        ac = {"mode": "memory_budget", "memory_budget": share}
        built = _build(world, compile=compiled, activation_checkpoint=ac)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.numel()) or t, lambda t: t):
            total, grads = _run(built)
        kept[share] = sum(saved)
        assert total == pytest.approx(plain[0], rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, plain[1][name], rtol=1e-4, atol=1e-6)
        torch._dynamo.reset()
    assert kept[budget] < 0.8 * kept[1.0]


def test_no_compiler_is_told_and_stays_eager(world, plain, monkeypatch, capsys):
    import shutil

    monkeypatch.setattr(shutil, "which", lambda name: None)
    total, _ = _run(_build(world, compile={"enable": True}))
    assert total == plain[0]
    assert "no C++ compiler" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_holds_in_one_process(world, plain, dtype):
    built = _build(world, training={"mixed_precision_param": dtype})
    total, grads = _run(built)
    assert total != plain[0]
    assert total == pytest.approx(plain[0], rel=2e-2)
    assert all(p.dtype == torch.float32 for p in built.parts[0].parameters())
    assert all(grad.dtype == torch.float32 for grad in grads.values())


def test_offload_changes_no_number(world, plain):
    total, grads = _run(_build(world, training={"enable_cpu_offload": True}))
    assert total == pytest.approx(plain[0], rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.to_local(), plain[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_emulated_float8_is_close_and_says_what_it_did(world, plain, recipe, capsys):
    pytest.importorskip("torchao")
    built = _build(
        world,
        model={"converters": ["float8"]},
        quantize={"linear": {"float8": {"recipe_name": recipe, "emulate": True, "filter_fqns": ["wk"]}}},
    )
    kinds = {type(m).__name__ for m in built.parts[0].modules() if isinstance(m, torch.nn.Linear)}
    assert kinds == {"Float8Linear", "Linear"}
    total, grads = _run(built)
    assert total != plain[0] and total == pytest.approx(plain[0], rel=5e-2)
    assert set(grads) == set(plain[1])
    table = capsys.readouterr().out
    assert "layers.attention.wq" in table and "converted" in table
    assert "layers.attention.wk" in table and "filter_fqns has 'wk'" in table


def test_float8_without_the_hardware_is_told(world):
    pytest.importorskip("torchao")
    with pytest.raises(UserError, match=r"compute capability 8.9.*emulate"):
        _build(world, model={"converters": ["float8"]})
