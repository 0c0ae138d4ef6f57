#!/usr/bin/env python
"""What the loader adds to tokenizing text, and how fast rows come from token shards.

    python tools/bench/data.py [--json]

``tokenized text``: rows from JSONL through BPE, against ``tiktoken.encode_ordinary_batch`` of the same documents with
one thread, as the loader's. ``token shards``: rows from memory-mapped shards, against a plain copy of the int64 tokens
and labels that the rows consist of. ``data wait``: seconds a step of the debug model waits for its batch, against the
step. The first two take turns in one process, in seconds of processor time, since one thread does all.
``tokens_per_second`` is ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from typing import Any

import _environment
import numpy as np

SEQ_LEN = 2048


def documents() -> list[str]:
    """The embedded corpus."""
    from titanlite.data.sources import EmbeddedSource

    source = EmbeddedSource()
    return [source.document(index) for index in range(len(source))]


def tokenizer_of(texts: list[str]) -> Any:
    """A small BPE tokenizer, trained here: none is downloaded."""
    from tiktoken._educational import bpe_train

    from titanlite.data.tokenizer import LLAMA3_PATTERN, BPETokenizer

    ranks = bpe_train("".join(texts[:40])[:60_000], 600, LLAMA3_PATTERN, visualise=None)
    specials = {"<|begin_of_text|>": len(ranks), "<|end_of_text|>": len(ranks) + 1}
    return BPETokenizer(ranks, LLAMA3_PATTERN, specials, "<|begin_of_text|>", "<|end_of_text|>")


def loader_over(dataset: str, path: Path, tokenizer: Any, rows: int) -> Any:
    """A loader that makes its batches when they are taken, so that all the work is in the measured time."""
    from titanlite.config import from_dict
    from titanlite.data.loader import build_loader

    training = {"dataset": dataset, "dataset_path": str(path), "seq_len": SEQ_LEN, "local_batch_size": rows}
    return build_loader(from_dict({"training": training, "data": {"prefetch": 0}}), tokenizer, 0, 1)


def text_case(folder: Path, rounds: int) -> dict[str, float]:
    """Rows from text against tokenizing alone."""
    from _report import case

    texts = documents()
    tokenizer = tokenizer_of(texts)
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours, theirs = [], []
    for _ in range(rounds):
        begun = time.process_time()
        encoded = tokenizer._encoding.encode_ordinary_batch(texts, num_threads=1)
        theirs.append(time.process_time() - begun)
        tokens = sum(map(len, encoded))
        loader = loader_over("jsonl", path, tokenizer, rows=4)
        steps = tokens // (4 * SEQ_LEN)
        begun = time.process_time()
        for _ in range(steps):
            loader.next()
        spent = time.process_time() - begun
        # Lanes part documents by number, so what was encoded is told by the lanes, not by the corpus.
        taken = sum(sum(lane.documents.taken) for lane in loader.lanes.values())
        ours.append(spent * tokens / taken)
        loader.close()
    return case(ours, theirs) | {"tokens_per_second": tokens / statistics.median(ours)}


def shard_case(folder: Path, rounds: int, steps: int, length: int) -> dict[str, float]:
    """Rows from token shards of documents of about ``length`` tokens against a plain copy."""
    from _report import case

    from titanlite.data.shards import token_dtype, write_manifest, write_shard
    from titanlite.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer("bytes")
    random = np.random.default_rng(0)
    count = 32_000_000 // length
    parts = (random.integers(0, 256, size) for size in random.integers(length // 2, length * 3 // 2, count))
    path = folder / f"tokens-{length}"
    path.mkdir()
    write_manifest(path, tokenizer, [write_shard(path, "00000", parts, token_dtype(tokenizer.vocab_size))])
    rows = 8
    loader = loader_over("tokens", path, tokenizer, rows)
    source = np.zeros((2, rows, SEQ_LEN), dtype=np.int64)
    ours, theirs = [], []
    for _ in range(rounds):
        begun = time.process_time()
        for _ in range(steps):
            loader.next()
        ours.append(time.process_time() - begun)
        begun = time.process_time()
        for _ in range(steps):
            source.copy()
        theirs.append(time.process_time() - begun)
    loader.close()
    return case(ours, theirs) | {"tokens_per_second": steps * rows * SEQ_LEN / statistics.median(ours)}


def wait_case() -> dict[str, float]:
    """What a step of the default run waits for data."""
    from _report import case

    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "titanlite.train", f"--job.dump_folder={folder}", "--training.steps=10"]
        words += ["--metrics.log_freq=1"]
        done = subprocess.run(words, cwd=_environment.ROOT, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit("the run failed; its error stands above")
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()][1:]
    return case([line["data_wait_seconds"] for line in lines], [line["step_seconds"] for line in lines])


def main() -> None:
    """Measure and print."""
    from _report import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=100, help="batches of 8 rows of 2,048 tokens in a turn of shards")
    parser.add_argument("--no-run", action="store_true", help="leave out the run of the debug model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = name
        cases = {"tokenized text": text_case(folder, arguments.rounds)}
        for length in (500, 5000):
            cases[f"token shards, documents of {length}"] = shard_case(
                folder, arguments.rounds, arguments.steps, length
            )
    if not arguments.no_run:
        cases["data wait"] = wait_case()
    report(cases, arguments.json)


if __name__ == "__main__":
    main()
