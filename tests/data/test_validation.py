"""Validation sees the same rows each time and on every layout, all of the data, and never waits for a rank without."""

import pytest

from tests.data.helpers import config, texts, write_jsonl
from titanlite.data.loader import build_validation_loader
from titanlite.data.tokenizer import build_tokenizer


def _rows(path, data_size, **table):
    """The rows that count something of every rank, and each rank's number of batches."""
    table = {"dataset": "jsonl", "dataset_path": path, "seq_len": 16, "local_batch_size": 2} | table
    made = config({"validation": table}, world_size=data_size)
    ranks = [list(build_validation_loader(made, build_tokenizer("bytes"), r, data_size)) for r in range(data_size)]
    assert {len(batch.tokens) for batches in ranks for batch in batches} <= {2}
    rows = [
        (tokens.tolist(), labels.tolist())
        for together in zip(*ranks, strict=True)
        for batch in together
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True)
        if (labels != -100).any()
    ]
    return rows, len(ranks[0])


@pytest.mark.parametrize("steps", [-1, 3])
def test_rows_are_the_same_on_every_layout(steps, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", texts(9))
    alone, _ = _rows(path, 1, steps=steps)
    assert alone == _rows(path, 2, steps=steps)[0] == _rows(path, 4, steps=steps)[0]
    assert steps == -1 or len(alone) == 3 * 4


def test_a_whole_pass_predicts_every_token_once(tmp_path):
    documents = texts(9)
    rows, _ = _rows(write_jsonl(tmp_path / "a.jsonl", documents), 2)
    stream = [token for text in documents for token in [*text.encode(), 256]]
    assert [label for _, labels in rows for label in labels if label != -100] == stream[1:]


def test_a_corpus_of_less_than_a_row_is_validated_by_all_ranks(tmp_path):
    rows, batches = _rows(write_jsonl(tmp_path / "a.jsonl", ["short"]), 4)
    assert batches == 1
    assert [[label for label in labels if label != -100] for _, labels in rows] == [[*b"hort", 256]]
