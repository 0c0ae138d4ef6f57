"""Communication of a step, by kind of collective: calls and bytes are the closed form's, and there is nothing else."""

import os

import pytest

from tests.parity import yardstick
from tests.parity.layouts import RING, Layout, micro
from tests.worlds import ranks

ROWS, SEQ, DIM, LAYERS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 32, 64, 4, 4, 8, 320
BLOCK = 2 * DIM * DIM + 2 * DIM * KV_HEADS * HEAD_DIM + 3 * DIM * 192 + 2 * DIM
TABLE = VOCABULARY * DIM
"""Elements of a block, and of the embedding or the head."""


def _step(values):
    """The traffic of a second step of forward and backward passes, as this rank calls it."""
    import torch

    from tests.parity.traffic import Traffic
    from titanlite.config import from_dict
    from titanlite.data.batch import Batch
    from titanlite.distributed.mesh import Mesh
    from titanlite.distributed.world import World
    from titanlite.parallel.apply import parallelize

    config = from_dict(values, world_size=int(os.environ["WORLD_SIZE"]))
    world = World.start(config.comm)
    try:
        mesh = Mesh.build(config, world)
        model = parallelize(config, mesh, world.device)
        tokens = torch.randint(0, 255, (ROWS // mesh.data_size, SEQ + 1))
        batch = Batch(tokens[:, :-1], tokens[:, 1:], None, None)
        for _ in range(2):
            for part in model.parts:
                part.zero_grad()
            with Traffic() as traffic:
                model.runner.forward_backward(batch, 1.0)
        return traffic.seen()
    finally:
        model = None
        world.close()


def fsdp(micros, always=False, tp=1, gathered=4, reduced=4):
    """Gathered once a forward and once a backward pass, but the head, still there; reduced once a step."""
    block, table = (BLOCK - 2 * DIM) // tp + 2 * DIM, TABLE // tp
    groups, most, head = LAYERS + 1, LAYERS * block + table, table + DIM
    again = 2 if always else 1
    return {
        "all_gather": (micros * (2 * groups + again), micros * gathered * (2 * most + again * head)),
        "reduce_scatter": (groups + 1, reduced * (most + head)),
    }


def fsdp_once(end):
    """A pipeline rank with half of the blocks and an end of the model: gathered and reduced once."""
    size = 4 * (LAYERS // 2 * BLOCK + end)
    return {"all_gather": (LAYERS // 2 + 1, size), "reduce_scatter": (LAYERS // 2 + 1, size)}


def tensor(passes, rows, layers=LAYERS, ends=2):
    """Hidden states gathered and scattered twice a block each way, and once each way at either end of the model."""
    hidden = rows * SEQ * DIM * 4
    calls = passes * (4 * layers + ends)
    return {"all_gather": (calls, calls * hidden), "reduce_scatter": (calls, calls * hidden)}


def vocabulary_loss(passes, tokens):
    """The largest logit of each token, then sum of exponentials and the label's logit."""
    return {"all_reduce": (2 * passes, passes * 3 * tokens * 4)}


def ring(passes, rows, share, size):
    """Keys and values one hop at a time: forward, again in backward, and their fp32 gradients home."""
    piece = 2 * rows * KV_HEADS * share * HEAD_DIM * 4
    calls = passes * LAYERS * 3 * (size - 1)
    return {"send": (calls, calls * piece), "recv": (calls, calls * piece)}


def gathered_keys(passes, rows):
    """Keys and values of everyone, forward and again in backward; their gradients reduced."""
    whole = 2 * rows * KV_HEADS * SEQ * HEAD_DIM * 4
    calls = passes * LAYERS
    return {"all_gather": (2 * calls, 2 * calls * whole), "reduce_scatter": (calls, calls * whole)}


def pipeline(micros, rows, links, length=SEQ):
    """Hidden states forwards and their gradients backwards over every link that this rank is at."""
    piece = micros * rows * length * DIM * 4
    return {"send": (links * micros, links * piece), "recv": (links * micros, links * piece)}


def total(*parts):
    """Sum of expectations."""
    out = {}
    for part in parts:
        for kind, (calls, size) in part.items():
            before = out.get(kind, (0, 0))
            out[kind] = before[0] + calls, before[1] + size
    return dict(sorted(out.items()))


def norm_sum(norms=2 * LAYERS + 1, calls=1):
    """Tensor parallelism: the norms' gradients are of a share of the sequence. By FSDP one parameter at a time."""
    return {"all_reduce": (calls, norms * DIM * 4)}


# What every rank does, or each pipeline rank.
CASES = {
    "one process": (Layout("dp1"), {}),
    "dp2": (Layout("dp2", 4), fsdp(1)),
    "dp2, accumulated": (Layout("dp2", 2), fsdp(2)),
    "dp2, always": (Layout("dp2", 4, {"fsdp_reshard_after_forward": "always"}), fsdp(1, always=True)),
    "dp2, bf16": (Layout("dp2", 2), fsdp(2, gathered=2)),
    "rep2 dp2": (
        Layout("rep2 dp2", 2),
        total(fsdp(1), {"all_reduce": (LAYERS + 2, 2 * (LAYERS * BLOCK + 2 * TABLE + DIM))}),
    ),
    "tp2": (Layout("tp2", 4), total(tensor(2, 4), vocabulary_loss(2, 4 * SEQ), norm_sum())),
    "cp2": (Layout("cp2", 4), total(fsdp(2), gathered_keys(2, 4))),
    "cp2, ring": (Layout("cp2", 4, RING), total(fsdp(2), ring(2, 4, SEQ // 2, 2))),
    "cp4, ring": (Layout("cp4", 4, RING), total(fsdp(2), ring(2, 4, SEQ // 4, 4))),
    "pp2": (Layout("pp2", 4), pipeline(8, 1, links=1)),
    "pp2, looped": (Layout("pp2", 4, schedule="Interleaved1F1B"), pipeline(8, 1, links=3)),
    # The turn of the V is on the last rank, which hands itself what would have been a message.
    "pp2, V": (Layout("pp2", 4, schedule="ZBVZeroBubble"), pipeline(8, 1, links=2)),
    "dp2 tp2": (
        Layout("dp2 tp2", 2),
        total(fsdp(2, tp=2), tensor(2, 2), vocabulary_loss(2, 2 * SEQ), norm_sum(calls=2 * LAYERS + 1)),
    ),
    "tp2 pp2": (
        Layout("tp2 pp2", 4, micro(2)),
        total(tensor(4, 2, 2, ends=1), pipeline(4, 2, 1, SEQ // 2), norm_sum(4)),
        total(tensor(4, 2, 2, ends=1), pipeline(4, 2, 1, SEQ // 2), norm_sum(5), vocabulary_loss(4, 2 * SEQ)),
    ),
    # Weights stay gathered over all micro-batches and rounds of a step.
    "dp2 pp2": (
        Layout("dp2 pp2", 2),
        *(total(fsdp_once(end), pipeline(4, 1, links=1)) for end in (TABLE, TABLE + DIM)),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in ("cp4, ring", "dp2") else name for name in CASES]
)
def test_a_step_communicates_what_the_closed_form_says(name, text, tmp_path):
    layout, *expected = CASES[name]
    tables = layout.tables()
    tables["training"]["mixed_precision_param"] = "bfloat16" if "bf16" in name else "float32"
    found = ranks(layout.size).run(_step, yardstick.settings(text, str(tmp_path), **tables))
    for rank, seen in enumerate(found):
        assert seen == expected[rank * len(expected) // layout.size]
