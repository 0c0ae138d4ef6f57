"""The corpus tools from outside: text to a tokenizer, text to shards, shards to rows."""

import json
import os
import subprocess
import sys

import pytest

from tests.command import ROOT
from tests.data.helpers import loaders, step, texts, write_jsonl


def _tool(name, *args, cache):
    words = [sys.executable, str(ROOT / "tools" / name), *map(str, args)]
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "a.jsonl", texts(120, 1))
    write_jsonl(folder / "b.jsonl", texts(80, 2))
    return folder


def test_shards_hold_the_corpus_and_a_second_start_goes_on(corpus, tmp_path):
    arguments = (corpus, "--tokenizer", "bytes", "--out", tmp_path / "tokens", "--documents-per-shard", 60)
    done = _tool("tokenize_corpus.py", *arguments, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert [shard["documents"] for shard in manifest["shards"]] == [60, 60, 60, 20]
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "tokens").glob("*.bin")}
    (tmp_path / "tokens" / "00002.bin").unlink()
    assert _tool("tokenize_corpus.py", *arguments, cache=tmp_path).returncode == 0
    after = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "tokens").glob("*.bin")}
    assert [name for name in sorted(before) if before[name] != after[name]] == ["00002.bin"]
    assert json.loads((tmp_path / "tokens" / "manifest.json").read_text()) == manifest
    tokens = loaders({"training": {"dataset": "tokens", "dataset_path": str(tmp_path / "tokens")}})
    text = loaders({"training": {"dataset": "jsonl", "dataset_path": str(corpus)}})
    assert [step(tokens) for _ in range(5)] == [step(text) for _ in range(5)]
    tokens[0].close(), text[0].close()


def test_a_trained_tokenizer_is_the_same_from_both_of_its_files(corpus, tmp_path):
    from titanlite.data.tokenizer import build_tokenizer

    done = _tool("train_tokenizer.py", corpus, "--vocab-size", 400, "--out", tmp_path / "tokenizer", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    from_json = build_tokenizer(str(tmp_path / "tokenizer" / "tokenizer.json"))
    from_ranks = build_tokenizer(str(tmp_path / "tokenizer" / "tokenizer.model"))
    assert from_json.vocab_size <= 400
    for text in texts(5, 9):
        assert from_json.encode(text).tolist() == from_ranks.encode(text).tolist()
        assert len(from_json.encode(text)) <= len(text.encode())


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("tokenize_corpus.py", ["nowhere.jsonl", "--tokenizer", "bytes"], "nowhere.jsonl"),
        ("tokenize_corpus.py", ["{corpus}", "--tokenizer", "nowhere"], "neither tokenizer.json"),
        ("train_tokenizer.py", ["{corpus}", "--vocab-size", "100"], "at least 258"),
    ],
)
def test_mistakes_are_told(corpus, tmp_path, tool, arguments, told):
    words = [word.format(corpus=corpus) for word in arguments]
    done = _tool(tool, *words, "--out", tmp_path / "out", cache=tmp_path)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_a_bad_record_stops_the_tool_with_its_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nnonsense\n')
    arguments = (tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out")
    done = _tool("tokenize_corpus.py", *arguments, cache=tmp_path)
    assert done.returncode == 2 and "record 2 is not JSON" in done.stderr
    done = _tool("tokenize_corpus.py", *arguments, "--skip-bad", cache=tmp_path)
    assert done.returncode == 0 and "1 records skipped" in done.stdout
