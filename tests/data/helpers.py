"""Small corpora, and loaders over them."""

import json

import numpy as np

from titanlite.config import from_dict
from titanlite.data.loader import build_loader
from titanlite.data.tokenizer import build_tokenizer


def config(values=None, size=4, micro=1, seq_len=16, world_size=1):
    given = {"training": {"global_batch_size": size, "local_batch_size": micro, "seq_len": seq_len}}
    for table, keys in (values or {}).items():
        given[table] = {**given.get(table, {}), **keys}
    return from_dict(given, world_size=world_size)


def loaders(values=None, data_size=1, **sizes):
    """The loaders of all data-parallel ranks."""
    made = config(values, world_size=data_size, **sizes)
    return [build_loader(made, build_tokenizer("bytes"), rank, data_size) for rank in range(data_size)]


def step(all_ranks):
    """The rows of the global batch, in order, each as (tokens, labels)."""
    batches = [loader.next() for loader in all_ranks]
    return [
        (tokens.tolist(), labels.tolist())
        for batch in batches
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True)
    ]


def states(all_ranks):
    """What a checkpoint would hold, through JSON as there."""
    merged = {}
    for loader in all_ranks:
        merged |= loader.lane_states()
    return {int(lane): state for lane, state in json.loads(json.dumps(merged)).items()}


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts(count, seed=0, longest=60):
    """Distinct documents of different lengths."""
    random = np.random.default_rng(seed)
    return [
        f"{i}:" + "".join(chr(97 + c) for c in random.integers(0, 26, random.integers(1, longest)))
        for i in range(count)
    ]
