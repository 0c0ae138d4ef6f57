"""Memory on each rank falls with the degrees as the closed form says."""

import os
import weakref

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parity.layouts import RING, Layout
from tests.parity.yardstick import settings
from tests.worlds import ranks

ROWS, SEQ, DIM, LAYERS, KV, VOCABULARY = 8, 128, 64, 4, 32, 320
BLOCK = 2 * DIM * DIM + 2 * DIM * KV + 3 * DIM * 192 + 2 * DIM
TABLE = VOCABULARY * DIM
MODEL = LAYERS * BLOCK + 2 * TABLE + DIM
"""Elements of a block, of the embedding or the head, of all."""


class Peak(TorchDispatchMode):
    """Bytes of the live storages while active, at the worst; sizes are read at each operation, as FSDP resizes."""

    def __init__(self, kept):
        super().__init__()
        self.storages = {}
        self.most = 0
        self._see(kept)

    def _see(self, tree):
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        live = {key: ref() for key, ref in self.storages.items()}
        self.storages = {key: self.storages[key] for key, storage in live.items() if storage is not None}
        self.most = max(self.most, sum(storage.nbytes() for storage in live.values() if storage is not None))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self._see(out)
        return out


def _measure(values):
    """Bytes of this rank's parameters, of its optimizer state, and the peak of a step's forward and backward passes."""
    from titanlite.config import from_dict
    from titanlite.data.batch import Batch
    from titanlite.distributed.mesh import Mesh
    from titanlite.distributed.world import World
    from titanlite.optim.optimizer import Optimizers
    from titanlite.parallel.apply import parallelize

    config = from_dict(values, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    world = World.start(config.comm)
    try:
        mesh = Mesh.build(config, world)
        model = parallelize(config, mesh, world.device)
        optimizers = Optimizers(list(model.parts), config)
        local = [p.to_local() if isinstance(p, DTensor) else p for p in optimizers.parameters()]
        state = [s.to_local() if isinstance(s, DTensor) else s for s in optimizers.named_state().values()]
        tokens = torch.randint(0, 255, (ROWS // mesh.data_size, SEQ + 1))
        batch = Batch(tokens[:, :-1], tokens[:, 1:], None, None)
        with Peak([p.detach() for p in local]) as peak:
            model.runner.forward_backward(batch, 1.0)
        return sum(p.nbytes for p in local), sum(s.nbytes for s in state if s.ndim), peak.most
    finally:
        model = optimizers = local = state = None
        world.close()


def measured(layout, text, folder, layers=LAYERS):
    tables = layout.tables()
    tables["training"] |= {"seq_len": SEQ, "loss_chunks": 1}
    values = settings(text, str(folder), model={"n_layers": layers}, **tables)
    return [_measure(values)] if layout.size == 1 else ranks(layout.size).run(_measure, values)


@pytest.fixture(scope="module")
def activations(text, tmp_path_factory):
    """Bytes of one row's activations in one process: of a block, and of everything outside the blocks."""
    folder = tmp_path_factory.mktemp("activations")
    [(deep, _, deep_peak)] = measured(Layout("dp1", ROWS), text, folder)
    [(shallow, _, shallow_peak)] = measured(Layout("dp1", ROWS), text, folder, LAYERS // 2)
    assert deep == 4 * MODEL
    block = (deep_peak - deep - shallow_peak + shallow) / (LAYERS // 2)
    return block / ROWS, (deep_peak - deep - LAYERS * block) / ROWS


def near(found, expected, share=0.15):
    assert abs(found / expected - 1) <= share, (
        f"{found} bytes, {found / expected:.3f} of the closed form's {expected:.0f}"
    )


def test_parameters_and_optimizer_state_are_cut_by_every_degree(text, tmp_path):
    norms, end = (2 * LAYERS + 1) * DIM, TABLE + DIM
    half = LAYERS // 2 * BLOCK
    cut = {
        "cp2": [MODEL / 2] * 2,
        "tp2": [(MODEL - norms) / 2 + norms] * 2,
        "pp2": [half + TABLE, half + end],
        "rep2 dp2": [MODEL / 2] * 4,
        "dp2 tp2": [((MODEL - norms) / 2 + norms) / 2] * 4,
        "dp2 pp2": [(half + TABLE) / 2] * 2 + [(half + end) / 2] * 2,
    }
    for degrees, elements in cut.items():
        found = measured(Layout(degrees, 2), text, tmp_path)
        # Two fp32 moments for each fp32 parameter.
        assert [(parameters, state) for parameters, state, _ in found] == [(4 * n, 8 * n) for n in elements], degrees


def test_peak_falls_with_rows_and_shards_under_fsdp(activations, text, tmp_path):
    block, ends = activations
    for _, _, peak in measured(Layout("dp2", ROWS // 2), text, tmp_path):
        # Gathered at the worst moment: two blocks, one of them ahead of its use, and the head.
        near(peak, 4 * (MODEL / 2 + 2 * BLOCK + TABLE) + ROWS / 2 * (LAYERS * block + ends))


def test_peak_falls_with_tensor_and_sequence_parallelism(activations, text, tmp_path):
    block, ends = activations
    # The gathered sequence is whole on every rank: the inputs of a block's two pairs of matrices.
    gathered = 2 * LAYERS * ROWS * SEQ * DIM * 4
    for parameters, _, peak in measured(Layout("tp2", ROWS), text, tmp_path):
        near(peak, parameters + (ROWS * (LAYERS * block + ends) - gathered) / 2 + gathered)


@pytest.mark.parametrize("keys", [{}, RING], ids=["gathered", "ring"])
def test_peak_falls_with_context_parallelism(keys, activations, text, tmp_path):
    block, ends = activations
    for _, _, peak in measured(Layout("cp2", ROWS, keys), text, tmp_path):
        near(peak, 4 * (MODEL / 2 + 2 * BLOCK + TABLE) + ROWS * (LAYERS * block + ends) / 2)


@pytest.mark.parametrize(("schedule", "in_flight"), [("1F1B", (2, 1)), ("GPipe", (ROWS, ROWS))])
def test_peak_of_a_pipeline_is_that_of_the_micro_batches_in_flight(schedule, in_flight, activations, text, tmp_path):
    block, ends = activations
    received = ROWS * SEQ * DIM * 4
    found = measured(Layout("pp2", ROWS, schedule=schedule), text, tmp_path)
    for rank, (parameters, _, peak) in enumerate(found):
        rows = in_flight[rank]
        # Of a micro-batch whose backward is not running the head keeps probabilities and the norm's input and output.
        head = (rows - 1) * SEQ * (VOCABULARY + 3 * DIM) * 4 + ends
        near(peak, 2 * parameters + received + rows * LAYERS / 2 * block + rank * head)
