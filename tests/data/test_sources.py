"""Every kind of source gives its documents in any order, and says what is wrong with a broken one."""

import gzip
import json

import numpy as np
import pytest

from tests.data.helpers import loaders, states, step, texts, write_jsonl
from titanlite.data.shards import token_dtype, write_manifest, write_shard
from titanlite.data.sources import BadRecord, build_source
from titanlite.data.tokenizer import build_tokenizer
from titanlite.errors import UserError

BYTES = build_tokenizer("bytes")
TEXTS = ["first", "second\nline", "dritte \u00fc\u4e2d\U0001f600", "x" * 300]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _documents(dataset, path):
    source = build_source(dataset, str(path), BYTES)
    return [source.document(i) for i in reversed(range(len(source)))][::-1]


def test_text_files_and_folders(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    assert _documents("text", tmp_path) == TEXTS
    assert _documents("text", tmp_path / "[01].txt") == TEXTS[:2]


def test_jsonl_plain_and_compressed(tmp_path):
    import zstandard

    file = tmp_path / "a.jsonl"
    write_jsonl(file, TEXTS)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(file.read_bytes()))
    assert _documents("jsonl", tmp_path) == TEXTS * 3
    assert _documents("c4_test", tmp_path / "a.jsonl") == TEXTS


def test_jsonl_without_a_last_line_break_and_with_empty_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "one"}\n\n{"text": "two"}')
    assert _documents("jsonl", tmp_path) == ["one", "two"]


def test_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=3)
    assert _documents("parquet", tmp_path) == TEXTS


def test_datasets_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "set")
    assert _documents("hf", tmp_path / "set") == TEXTS


def _shards(folder, documents):
    folder.mkdir()
    arrays = [np.append(BYTES.encode(text), BYTES.eos_id) for text in documents]
    dtype = token_dtype(BYTES.vocab_size)
    entries = [write_shard(folder, "00000", arrays[:2], dtype), write_shard(folder, "00001", arrays[2:], dtype)]
    write_manifest(folder, BYTES, entries)
    return arrays


def test_token_shards(tmp_path):
    arrays = _shards(tmp_path / "shards", TEXTS)
    for found, expected in zip(_documents("tokens", tmp_path / "shards"), arrays, strict=True):
        assert np.array_equal(found, expected)


def test_token_shards_give_the_rows_of_their_text(tmp_path):
    documents = texts(20)
    _shards(tmp_path / "shards", documents)
    from_tokens = loaders({"training": {"dataset": "tokens", "dataset_path": str(tmp_path / "shards")}})
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    from_text = loaders({"training": {"dataset": "jsonl", "dataset_path": path}})
    assert [step(from_tokens) for _ in range(5)] == [step(from_text) for _ in range(5)]
    from_tokens[0].close(), from_text[0].close()


def test_a_cut_shard_is_told(tmp_path):
    _shards(tmp_path / "shards", TEXTS)
    file = tmp_path / "shards" / "00001.bin"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"00001.bin.*cut or changed"):
        build_source("tokens", str(tmp_path / "shards"), BYTES)


def test_a_broken_record_is_named_or_skipped(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good one"}\n{"text": 7}\n{"text": \n{"other": "x"}\n{"text": "good two"}\n')
    source = build_source("jsonl", str(file), BYTES)
    with pytest.raises(BadRecord, match=r"a.jsonl: record 2 has no text"):
        source.document(1)
    with pytest.raises(BadRecord, match=r"record 3 is not JSON"):
        source.document(2)
    values = {"training": {"dataset": "jsonl", "dataset_path": str(file)}}
    (loader,) = loaders(values, size=1)
    with pytest.raises(UserError, match=r"record \d.*on_bad_record"):
        [loader.next() for _ in range(9)]
    loader.close()
    (loader,) = loaders(values | {"data": {"on_bad_record": "skip"}}, size=1)
    [loader.next() for _ in range(3)]
    assert loader.skipped() > 0
    loader.close()


def test_a_corpus_of_broken_records_ends_with_words(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{\n{\n")
    values = {"training": {"dataset": "jsonl", "dataset_path": str(file)}, "data": {"on_bad_record": "skip"}}
    (loader,) = loaders(values, size=1)
    with pytest.raises(UserError, match="no record of jsonl can be read"):
        loader.next()
    loader.close()


@pytest.mark.parametrize(("dataset", "content"), [("jsonl", ""), ("text", None), ("parquet", None), ("tokens", None)])
def test_nothing_there_is_told(dataset, content, tmp_path):
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        build_source(dataset, str(tmp_path), BYTES)


def test_a_mixture_follows_its_weights(tmp_path):
    paths = {name: write_jsonl(tmp_path / f"{name}.jsonl", texts(50, seed)) for seed, name in enumerate("abc")}
    sources = [
        {"name": name, "dataset": "jsonl", "path": path, "weight": weight}
        for (name, path), weight in zip(paths.items(), [0.5, 0.3, 0.2], strict=True)
    ]
    (loader,) = loaders({"data": {"sources": sources}}, size=2, micro=2)
    for _ in range(500):
        loader.next()
    assert loader.shares() == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, abs=0.01)
    state = states([loader])
    after = step([loader])
    (again,) = loaders({"data": {"sources": sources}}, size=2, micro=2)
    again.load_lane_states(state)
    assert step([again]) == after
    loader.close(), again.close()


def test_the_fingerprint_names_what_changed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", texts(5))
    values = {"training": {"dataset": "jsonl", "dataset_path": path}}
    before = loaders(values)[0].fingerprint()
    write_jsonl(tmp_path / "a.jsonl", texts(5, seed=1))
    after = loaders(values)[0].fingerprint()
    assert [name for name in before if before[name] != after[name]] == ["source jsonl"]
    other = loaders(values | {"debug": {"seed": 3}})[0].fingerprint()
    assert [name for name in after if other[name] != after[name]] == ["seed"]


def test_an_error_in_the_thread_reaches_the_step(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", texts(5))
    (loader,) = loaders({"training": {"dataset": "jsonl", "dataset_path": path}})
    (tmp_path / "a.jsonl").unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            loader.next()
    loader.close()


def test_opening_far_in_takes_no_longer(tmp_path):
    _shards(tmp_path / "shards", texts(100))
    values = {"training": {"dataset": "tokens", "dataset_path": str(tmp_path / "shards")}}
    (loader,) = loaders(values, size=1)
    reads = []
    source = loader.lanes[0].documents.parts[0].source
    document = source.document
    source.document = lambda index: reads.append(index) or document(index)
    far = {
        0: {"data_step": 10**6, "open": [[0, 123_456_789, 3]], "positions": [123_456_790], "taken": [9], "skipped": 0}
    }
    loader.load_lane_states(
        json.loads(json.dumps(far), object_hook=lambda d: {int(k) if k.isdigit() else k: v for k, v in d.items()})
    )
    assert len(reads) == 1 and loader.data_step == 10**6
    assert loader.next().tokens.shape == (1, 16)
    loader.close()


def test_what_is_logged_of_the_data(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", texts(6, seed)) for seed, name in enumerate("ab")]
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text() + "nonsense\n")
    sources = [{"name": name, "dataset": "jsonl", "path": path} for name, path in zip("ab", paths, strict=True)]
    (loader,) = loaders({"data": {"sources": sources, "on_bad_record": "skip"}}, size=1)
    assert loader.facts()["epoch"] == loader.facts()["records_skipped"] == 0
    for _ in range(60):
        loader.next()
    facts = loader.facts()
    assert facts["epoch"] > 0 and facts["records_skipped"] > 0
    assert facts["data_share/a"] + facts["data_share/b"] == pytest.approx(1)
    loader.close()
