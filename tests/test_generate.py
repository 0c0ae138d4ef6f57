"""Generation equals transformers' greedy output on the same weights, in batches, from either format, with and without TP."""

import subprocess
import sys

import pytest
import torch

from tests.checkpoint.helpers import manager
from tests.command import ROOT, environment
from tests.worlds import ranks
from titanlite.checkpoint import hf
from titanlite.checkpoint.manager import Snapshot
from titanlite.config import from_dict
from titanlite.generate import choose, generate
from titanlite.models.init import initialise
from titanlite.models.registry import family
from titanlite.models.sizes import sizes_of

MODELS = {
    "llama3": {"n_heads": 4, "n_kv_heads": 2},
    "qwen3": {"name": "qwen3", "n_heads": 4, "n_kv_heads": 2},
}
PROMPTS = [[65, 66, 67, 68, 69], [70, 71], [72]]


def _config(kind):
    sizes = {"dim": 64, "n_layers": 2, "ffn_dim": 96, "head_dim": 16, "init_std": 0.2}
    return from_dict({"model": sizes | MODELS[kind], "training": {"seq_len": 64}})


@pytest.fixture(scope="module", params=MODELS)
def trained(request, tmp_path_factory):
    """A model, its checkpoint, and its export."""
    folder = tmp_path_factory.mktemp(request.param)
    config = _config(request.param)
    sizes = sizes_of(config.model)
    model = family(config.model.name).build(sizes)
    initialise(model, 3, sizes.init_std, sizes.n_layers)
    with manager(folder) as made:
        made.config = config
        made.save(1, lambda: Snapshot(dict(model.named_parameters()), {}, {"step": 1}, {}, {}))
    hf.export(folder / "checkpoint" / "step-1", folder / "hf", config, "float32")
    return model, folder


def test_greedy_output_is_that_of_transformers(trained):
    transformers = pytest.importorskip("transformers")
    model, folder = trained
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    ours = generate(model, PROMPTS, 24, eos=256)
    for prompt, made in zip(PROMPTS, ours, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=256, pad_token_id=256
        )
        expected = expected[0, len(prompt) :].tolist()
        assert made == [token for token in expected if token != 256]


def test_a_batch_gives_what_each_prompt_gives_alone(trained):
    model, _ = trained
    assert generate(model, PROMPTS, 16, eos=256) == [generate(model, [p], 16, eos=256)[0] for p in PROMPTS]


def test_the_model_is_as_before_afterwards(trained):
    model, _ = trained
    tokens = torch.tensor([PROMPTS[0]])
    before = model(tokens)
    generate(model, PROMPTS, 4, eos=256)
    assert torch.equal(model(tokens), before)


def _load(folder):
    from pathlib import Path

    from tests.worlds import world
    from titanlite.pretrained import load

    with world() as started:
        model, tokenizer = load(Path(folder), started)
        return generate(model, PROMPTS, 8, tokenizer.eos_id, multiple=started.size)


def test_tensor_parallel_and_both_formats_give_the_same(trained):
    model, folder = trained
    expected = generate(model, PROMPTS, 8, eos=256)
    assert ranks(1).run(_load, str(folder / "checkpoint")) == [expected]
    assert ranks(2).run(_load, str(folder / "checkpoint" / "step-1")) == [expected] * 2


def test_sampling_follows_seed_and_nucleus():
    logits = torch.tensor([[2.0, 1.9, 1.0, -5.0]]).repeat(2000, 1)
    picked = choose(logits, 1.0, 0.8, torch.Generator().manual_seed(0))
    assert set(picked.tolist()) == {0, 1}
    again = choose(logits, 1.0, 0.8, torch.Generator().manual_seed(0))
    assert torch.equal(picked, again)
    assert not torch.equal(picked, choose(logits, 1.0, 0.8, torch.Generator().manual_seed(1)))
    assert choose(logits, 0.0, 1.0, torch.Generator()).unique().tolist() == [0]
    shares = picked.bincount() / 2000
    assert shares[0].item() == pytest.approx(0.525, abs=0.04)


def test_the_tool_writes_text_and_says_what_is_wrong(trained):
    _, folder = trained
    tool = [sys.executable, str(ROOT / "tools" / "generate.py")]
    words = ["--checkpoint", str(folder / "checkpoint"), "--prompt", "abc", "--tokens", "4"]
    done = subprocess.run([*tool, *words], capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 0 and done.stdout.startswith("abc"), done.stderr
    words[1] = str(folder)
    done = subprocess.run([*tool, *words], capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 2 and "no intact checkpoint" in done.stderr and "Traceback" not in done.stderr
