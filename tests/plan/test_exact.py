"""The closed form against the real code on fake tensors: memory near, the bytes of every collective equal."""

from collections import Counter

import pytest

from titanlite.config import from_dict
from titanlite.plan import dryrun
from titanlite.plan.communication import collectives
from titanlite.plan.memory import memory
from titanlite.plan.workload import from_config

OP = {"mode": "selective", "selective_ac_option": "op"}


def config(world, recompute=None, precision="float32", layers=6, **parallelism):
    return from_dict(
        {
            "model": {"n_layers": layers},
            "training": {"local_batch_size": 8, "seq_len": 128, "mixed_precision_param": precision},
            "activation_checkpoint": recompute or {"mode": "none"},
            "parallelism": parallelism,
        },
        world_size=world,
    )


CASES = {
    "one process": (1, {}, 0.10),
    "dp2": (2, {}, 0.10),
    "dp4 bf16": (4, {"precision": "bfloat16"}, 0.10),
    "dp2 full": (2, {"recompute": {"mode": "full"}}, 0.10),
    "dp2 op": (2, {"recompute": OP}, 0.10),
    "dp2 tp2": (4, {"tensor_parallel_degree": 2}, 0.10),
    "dp2 cp2": (4, {"context_parallel_degree": 2}, 0.10),
    "pp2 tp2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}, 0.15),
}


@pytest.mark.parametrize("name", CASES)
def test_closed_form_is_what_the_real_code_does(name):
    world, keys, share = CASES[name]
    made = config(world, **keys)
    exact = dryrun.one_rank(made, world, 0)
    w = from_config(made, world, on_cpu=True)
    calls, count = Counter(), Counter()
    for each in collectives(w, 0):
        calls[each.kind, each.size] += each.calls
        count[each.kind, each.size] += each.bytes
    assert exact.collectives == {key: (calls[key], count[key]) for key in calls}
    assert memory(w, 0).total == pytest.approx(exact.peak, rel=share)


def test_two_and_three_blocks_give_the_rest():
    made = config(2)
    short, full = dryrun.one_rank(made, 2, 0), dryrun.one_rank(made, 2, 0, full=True)
    assert short.collectives == full.collectives
    assert short.flops == pytest.approx(full.flops)
    assert short.peak == pytest.approx(full.peak, rel=0.01)


def test_a_dry_run_prints_memory_and_collectives(capsys):
    assert dryrun.main(config(2, layers=2), 2) == 0
    out = capsys.readouterr().out
    assert "peak" in out and "all_gather" in out and "over     2 ranks" in out
