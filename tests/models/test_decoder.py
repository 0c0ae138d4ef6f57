"""The decoder in plain PyTorch: sizes, rotation, masks, stages."""

import pytest
import torch

from titanlite.config import from_dict
from titanlite.models.decoder import Decoder
from titanlite.models.rotary import frequencies, rotate, rotation
from titanlite.models.sizes import DecoderSizes, RopeScaling, sizes_of

SMALL = DecoderSizes(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=50, rope_scaling=RopeScaling()
)


@pytest.mark.parametrize(
    ("flavor", "millions"),
    [("1B", 1235.814), ("3B", 3212.750), ("8B", 8030.261), ("70B", 70553.706), ("405B", 405853.389)],
)
def test_parameter_counts_are_the_published_ones(flavor, millions):
    sizes = sizes_of(from_dict({"model": {"flavor": flavor}}).model)
    with torch.device("meta"):
        model = Decoder(sizes)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == sizes.parameters
    assert counted / 1e6 == pytest.approx(millions, abs=0.001)


def test_a_changed_width_rescales_what_it_implies():
    sizes = sizes_of(from_dict({"model": {"dim": 128}}).model)
    flavor = sizes_of(from_dict({}).model)
    assert sizes.head_dim == 128 // sizes.n_heads
    assert sizes.ffn_dim == flavor.ffn_dim // 2


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=32.0)])
def test_rotation_equals_transformers(scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rope = {"rope_type": "default", "rope_theta": 500000.0}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=131072, rope_parameters=rope
    )
    x = torch.randn(1, 2, 64, 64)
    positions = torch.arange(64)[None] + 9000
    theirs_cos, theirs_sin = LlamaRotaryEmbedding(config)(x, positions)
    theirs, _ = apply_rotary_pos_emb(x, x, theirs_cos, theirs_sin)
    cos, sin = rotation(positions, frequencies(64, 500000.0, scaling, x.device))
    torch.testing.assert_close(rotate(x, cos[:, None], sin[:, None]), theirs, rtol=1e-5, atol=1e-5)


def test_a_token_never_sees_a_later_one():
    model = Decoder(SMALL)
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_a_document_never_sees_another():
    model = Decoder(SMALL)
    tokens = torch.randint(50, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    together = model(tokens, positions=positions, documents=documents)
    torch.testing.assert_close(together[:, 5:], model(tokens[:, 5:]), rtol=1e-5, atol=1e-5)


def test_stages_in_turn_are_the_whole_model():
    model = Decoder(SMALL)
    first, second = Decoder(SMALL), Decoder(SMALL)
    for part in (first, second):
        part.load_state_dict(model.state_dict())
    first.norm = first.output = None
    second.tok_embeddings = None
    del first.layers["1"], second.layers["0"]
    tokens, labels = torch.randint(50, (2, 12)), torch.randint(50, (2, 12))
    assert torch.equal(second(first(tokens), labels), model(tokens, labels))


def test_tied_weights_are_one_parameter():
    from dataclasses import replace

    tied = replace(SMALL, tie_embeddings=True)
    with torch.device("meta"):
        model = Decoder(tied)
    model.to_empty(device="cpu")
    model.tie()
    assert model.output.weight is model.tok_embeddings.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == tied.parameters
