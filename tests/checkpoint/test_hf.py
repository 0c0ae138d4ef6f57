"""Weights move to and from transformers' Llama and Qwen3: logits equal at every position, files and config in order."""

import json
import subprocess
import sys

import pytest
import torch

from tests.checkpoint.helpers import manager
from tests.command import ROOT
from titanlite.checkpoint import convert, hf
from titanlite.checkpoint.manager import Snapshot
from titanlite.config import from_dict
from titanlite.errors import UserError
from titanlite.models.init import initialise
from titanlite.models.registry import family
from titanlite.models.sizes import sizes_of

transformers = pytest.importorskip("transformers")

SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "grouped": {"n_heads": 8, "n_kv_heads": 2},
    "each its own": {"n_heads": 8, "n_kv_heads": 8},
    "one": {"n_heads": 4, "n_kv_heads": 1},
    "tied": {"n_heads": 4, "n_kv_heads": 2, "tie_embeddings": True},
    "scaled": {"n_heads": 4, "n_kv_heads": 2, "rope_scaling": SCALING},
}


def _config(model):
    sizes = {"dim": 64, "n_layers": 2, "ffn_dim": 96, "head_dim": 16, "init_std": 0.15}
    return from_dict({"model": sizes | model, "training": {"seq_len": 64}})


def _model(config):
    sizes = sizes_of(config.model)
    model = family(config.model.name).build(sizes)
    initialise(model, 3, sizes.init_std, sizes.n_layers)
    return model


def _checkpoint(folder, model, config):
    """A checkpoint of ``model`` as a run of ``config`` leaves it."""
    with manager(folder) as made:
        made.config = config
        snapshot = Snapshot(dict(model.named_parameters()), {}, {"step": 1}, {}, {})
        made.save(1, lambda: snapshot)
    return folder / "checkpoint" / "step-1"


TOKENS = torch.randint(320, (2, 64), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", MODELS)
def test_an_export_has_the_logits_of_the_model(kind, tmp_path):
    config = _config(MODELS[kind])
    model = _model(config)
    step = _checkpoint(tmp_path, model, config)
    hf.export(step, tmp_path / "exported", config, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_an_import_has_the_logits_of_transformers(kind, tmp_path):
    config = _config(MODELS[kind])
    sizes = sizes_of(config.model)
    described = hf.hf.hf_config("llama3", sizes, "float32", 64, None, 256)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**described)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = family("llama3").build(sizes)
    hf.load_weights(tmp_path, dict(model.named_parameters()), config)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["grouped", "tied"])
def test_there_and_back_changes_no_bit_and_index_and_files_agree(kind, tmp_path):
    import safetensors

    config = _config(MODELS[kind])
    model = _model(config)
    step = _checkpoint(tmp_path, model, config)
    hf.export(step, tmp_path / "exported", config, "float32", shard_bytes=50_000)
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())["weight_map"]
    held = {}
    for file in sorted((tmp_path / "exported").glob("*.safetensors")):
        with safetensors.safe_open(str(file), "pt") as opened:
            held |= {name: file.name for name in opened.keys()}  # noqa: SIM118
    assert held == index
    assert ("lm_head.weight" in held) == (kind != "tied")
    described = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert described["tie_word_embeddings"] == (kind == "tied") and described["vocab_size"] == 320
    convert.convert(tmp_path / "exported", tmp_path / "back" / "step-0")
    again = family("llama3").build(sizes_of(config.model))
    with manager(tmp_path / "run", initial_load_path=str(tmp_path / "back" / "step-0")) as made:
        made.config = config
        identity = {
            f"model.{name}": str(value) for name, value in vars(sizes_of(config.model)).items() if name != "init_std"
        }
        made.restore(Snapshot(dict(again.named_parameters()), {}, {}, {}, identity))
    for (name, ours), (_, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_the_tool_converts_and_says_what_is_wrong(tmp_path):
    config = _config(MODELS["grouped"])
    step = _checkpoint(tmp_path, _model(config), config)
    tool = [sys.executable, str(ROOT / "tools" / "convert_checkpoint.py")]
    done = subprocess.run(
        [*tool, str(step), str(tmp_path / "out"), "--dtype", "bfloat16"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with hf.opened(tmp_path / "out") as read:
        assert read("model.norm.weight").dtype == torch.bfloat16
    again = subprocess.run([*tool, str(step), str(tmp_path / "out")], capture_output=True, text=True)
    assert again.returncode == 2 and "exists already" in again.stderr
    file = step / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    damaged = subprocess.run([*tool, str(step), str(tmp_path / "other")], capture_output=True, text=True)
    assert damaged.returncode == 2 and "__0_0.distcp has" in damaged.stderr and "Traceback" not in damaged.stderr
    told = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "verify_checkpoint.py"), str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 1 and "not intact: __0_0.distcp" in told.stdout


def test_another_model_is_named_by_its_first_difference(tmp_path):
    config = _config(MODELS["grouped"])
    hf.export(_checkpoint(tmp_path, _model(config), config), tmp_path / "out", config, "float32")
    other = _config(MODELS["grouped"] | {"n_layers": 3})
    with pytest.raises(UserError, match=r"n_layers = 2, this run's has 3"):
        hf.load_weights(tmp_path / "out", {}, other)
