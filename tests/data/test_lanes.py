"""Row j of data step t is the same on every layout and after any stop; no token is lost or repeated."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.helpers import loaders, states, step, texts, write_jsonl
from titanlite.data.batch import IGNORED
from titanlite.data.mixture import Documents, Part, Settings
from titanlite.data.packing import Lane
from titanlite.data.shards import token_dtype, write_manifest, write_shard
from titanlite.data.sources import build_source
from titanlite.data.tokenizer import build_tokenizer


def _corpus(folder, count=23):
    return {"training": {"dataset": "jsonl", "dataset_path": write_jsonl(Path(folder) / "corpus.jsonl", texts(count))}}


def _values(folder, kind):
    """Settings that read a small corpus of a kind."""
    folder = Path(folder)
    if kind == "jsonl":
        return _corpus(folder)
    if kind == "mixture":
        sources = [
            {"name": name, "dataset": "jsonl", "path": write_jsonl(folder / f"{name}.jsonl", texts(20, i)), "weight": w}
            for i, (name, w) in enumerate([("a", 0.7), ("b", 0.3)])
        ]
        return {"data": {"sources": sources}}
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts(23)}), folder / "a.parquet", row_group_size=4)
        return {"training": {"dataset": "parquet", "dataset_path": str(folder)}, "data": {"shuffle_buffer": 5}}
    tokenizer = build_tokenizer("bytes")
    documents = [np.append(tokenizer.encode(text), tokenizer.eos_id) for text in texts(23)]
    write_manifest(folder, tokenizer, [write_shard(folder, "0", documents, token_dtype(tokenizer.vocab_size))])
    return {"training": {"dataset": "tokens", "dataset_path": str(folder)}}


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["jsonl", "mixture", "parquet", "tokens"]),
    layouts=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3),
    size=st.sampled_from([4, 8, 12]),
    stops=st.lists(st.integers(0, 5), min_size=3, max_size=3),
    data=st.sampled_from([{}, {"packing": "best_fit"}, {"prefetch": 0}, {"shuffle": False}]),
    mask=st.booleans(),
    pack=st.booleans(),
)
def test_rows_do_not_depend_on_layout_or_stops(kind, layouts, size, stops, data, mask, pack):
    with tempfile.TemporaryDirectory() as folder:
        values = _values(folder, kind)
        values["training"] = values.get("training", {}) | {"document_mask": mask}
        if data.get("packing") != "best_fit":
            values["training"]["pack_documents"] = pack
        values["data"] = values.get("data", {}) | data
        straight = loaders(values, size=size)
        expected = [step(straight) for _ in range(sum(stops))]
        found, state = [], None
        for layout, steps in zip(layouts * 3, stops, strict=False):
            ranks = loaders(values, data_size=layout, size=size)
            if state is not None:
                for loader in ranks:
                    loader.load_lane_states(state)
            found += [step(ranks) for _ in range(steps)]
            state = states(ranks)
            for loader in ranks:
                loader.close()
        straight[0].close()
        assert found == expected


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(2, 40),
    lanes=st.integers(1, 3),
    seq_len=st.integers(2, 40),
    packing=st.sampled_from(["greedy", "best_fit"]),
    mask=st.booleans(),
)
def test_no_token_is_lost_or_repeated_within_an_epoch(count, lanes, seq_len, packing, mask):
    with tempfile.TemporaryDirectory() as folder:
        source = build_source("jsonl", write_jsonl(Path(folder) / "a.jsonl", texts(count)), build_tokenizer("bytes"))
        seen = []
        for number in range(lanes):
            documents = Documents(
                [Part("a", source, 1.0)], build_tokenizer("bytes"), number, lanes, Settings(seed=3, loop=False)
            )
            lane = Lane(documents, seq_len, True, packing == "best_fit", mask)
            rows = list(iter(lane.row, None))
            rest = lane.rest()
            seen += [token for row in rows for token in row[0]]
            if rest is not None:
                seen += rest[0][rest[1] != IGNORED].tolist() if not mask else _used(rest)
            if rows or rest is not None:
                seen.append(256)
        everything = [token for text in texts(count) for token in [*text.encode(), 256]]
        assert Counter(map(int, seen)) == Counter(everything)


def _used(rest):
    """The inputs of a padded row up to the last that predicts; labels between documents are masked too."""
    tokens, labels, *_ = rest
    last = np.flatnonzero(labels != IGNORED)
    return tokens[: last[-1] + 1].tolist() if len(last) else []


def test_greedy_packing_predicts_every_token_once():
    with tempfile.TemporaryDirectory() as folder:
        (loader,) = loaders(_corpus(folder) | {"data": {"shuffle": False}}, size=1)
        stream = [token for text in texts(23) for token in [*text.encode(), 256]]
        rows = [step([loader])[0] for _ in range((len(stream) - 1) // 16)]
        loader.close()
    tokens = [token for row, _ in rows for token in row]
    labels = [label for _, row in rows for label in row]
    assert tokens == stream[: len(tokens)]
    assert labels == stream[1 : len(labels) + 1]


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_lanes_share_no_document_within_an_epoch(lanes, tmp_path):
    (loader,) = loaders(_corpus(tmp_path, 40) | {"data": {"on_end": "stop"}}, size=lanes, micro=lanes, seq_len=4)
    seen = {lane: [] for lane in range(lanes)}
    while loader.has_next():
        for lane, (tokens, _) in enumerate(step([loader])):
            seen[lane] += tokens
    loader.close()
    numbers = []
    for tokens in seen.values():
        text = bytes(t if t < 256 else 10 for t in tokens).decode()
        numbers += [line.split(":")[0] for line in text.split("\n") if ":" in line]
    assert len(numbers) == len(set(numbers)) > 30


def test_padded_rows_count_only_their_document(tmp_path):
    values = {"training": {"dataset": "jsonl", "pack_documents": False}, "data": {"shuffle": False}}
    values["training"]["dataset_path"] = write_jsonl(tmp_path / "a.jsonl", ["abcdef", "x" * 20])
    (loader,) = loaders(values, size=1, seq_len=8)
    rows = [step([loader])[0] for _ in range(4)]
    loader.close()
    counted = [[label for label in labels if label != -100] for _, labels in rows]
    assert counted[0] == [*b"bcdef", 256]
    assert [len(row) for row in counted[1:]] == [8, 8, 4]
    assert sum(counted[1:], []) == [*b"x" * 19, 256]


def test_masked_labels_do_not_cross_documents(tmp_path):
    values = {"training": {"dataset": "jsonl", "document_mask": True}, "data": {"shuffle": False}}
    values["training"]["dataset_path"] = write_jsonl(tmp_path / "a.jsonl", ["abc", "defgh"])
    (loader,) = loaders(values, size=1, seq_len=8)
    batch = loader.next()
    loader.close()
    assert batch.tokens[0].tolist() == [*b"abc", 256, *b"defg"]
    assert batch.labels[0].tolist() == [*b"bc", 256, -100, *b"efgh"]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert batch.documents[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_state_is_small_whatever_the_document(tmp_path):
    values = {"training": {"dataset": "jsonl", "dataset_path": write_jsonl(tmp_path / "a.jsonl", ["y" * 500_000])}}
    (loader,) = loaders(values, size=1)
    step([loader])
    assert len(str(states([loader]))) < 300
    loader.close()


def test_the_data_end_where_any_lane_ends(tmp_path):
    values = _corpus(tmp_path, 7) | {"data": {"on_end": "stop"}}
    ranks = loaders(values, data_size=2, size=2, seq_len=8)
    steps = 0
    while all([loader.has_next() for loader in ranks]):
        step(ranks)
        steps += 1
    assert 0 < steps < 60
    for loader in ranks:
        loader.close()


def test_skipping_equals_taking(tmp_path):
    (one,), (other,) = loaders(_corpus(tmp_path)), loaders(_corpus(tmp_path))
    for _ in range(5):
        step([one])
    other.skip(5)
    assert step([one]) == step([other])
    assert one.data_step == other.data_step == 6
    one.close(), other.close()
