"""Peaks above parameters and gradients, as tools/bench/memory.py measures them."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("memory_bench", ROOT / "tools" / "bench" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chunked_loss_takes_under_a_fifth_of_the_plain_one(bench):
    plain = bench.head(1)
    assert plain > 2 * 4 * bench.TOKENS * bench.VOCABULARY, "logits and their gradient would have to be seen"
    assert bench.head(0) <= 0.2 * plain


def test_each_checkpointing_policy_keeps_what_it_says(bench):
    number = 4
    kept = {policy: bench.blocks(policy, number) for policy in bench.POLICIES}
    one_block = kept["none"] - bench.blocks("none", number - 1)
    an_input = 4 * bench.TOKENS * bench.DIM
    # What is there with any policy: the head and the last block's gradients.
    rest = bench.blocks("full", 1) - one_block
    assert kept["full"] <= number * an_input + one_block + max(rest, 0) + an_input
    assert kept["full"] < kept["op"] < kept["none"]
    assert kept["full"] < kept["every 2nd block"] < kept["none"]
