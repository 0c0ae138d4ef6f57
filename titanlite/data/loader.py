"""Rows of the global batch for one data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titanlite.data.batch import Batch
from titanlite.data.sources import Source, build_source
from titanlite.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from titanlite.config import Config


class DataEnded(Exception):
    """There is no further batch."""


class Lane:
    """One row of the global batch, step after step: documents j, j + B, ... of the epochs' permutations."""

    def __init__(self, source: Source, tokenizer: Tokenizer, lane: int, lanes: int, seq_len: int, seed: int):
        self.source, self.tokenizer, self.lanes, self.seq_len, self.seed = source, tokenizer, lanes, seq_len, seed
        self.position, self.offset = lane, 0
        self.tokens = self._document(lane)

    def row(self) -> np.ndarray:
        """The next seq_len + 1 tokens; the last comes again as the first of the next row."""
        while len(self.tokens) - self.offset < self.seq_len + 1:
            rest = self.tokens[self.offset :]
            self.position += self.lanes
            self.tokens, self.offset = np.concatenate([rest, self._document(self.position)]), 0
        row = self.tokens[self.offset : self.offset + self.seq_len + 1]
        self.offset += self.seq_len
        return row

    def _document(self, position: int) -> np.ndarray:
        epoch, index = divmod(position, len(self.source))
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.source))
        return np.append(self.tokenizer.encode(self.source.document(int(order[index]))), self.tokenizer.eos_id).astype(np.int64)

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "rest": self.tokens[self.offset :].tolist()}

    def load(self, state: dict[str, Any]) -> None:
        self.position, self.tokens, self.offset = state["position"], np.array(state["rest"], dtype=np.int64), 0


class Loader:
    """Batches of this rank's rows."""

    def __init__(self, lanes: dict[int, Lane], fingerprint: dict[str, str]):
        self.lanes, self._fingerprint, self.data_step = lanes, fingerprint, 0

    def next(self) -> Batch:
        rows = torch.from_numpy(np.stack([lane.row() for lane in self.lanes.values()]))
        self.data_step += 1
        return Batch(rows[:, :-1], rows[:, 1:])

    def has_next(self) -> bool:
        return True

    def skip(self, steps: int) -> None:
        for _ in range(steps):
            self.next()

    def lane_states(self) -> dict[int, Any]:
        return {number: lane.state() | {"data_step": self.data_step} for number, lane in self.lanes.items()}

    def load_lane_states(self, states: dict[int, Any]) -> None:
        for number, lane in self.lanes.items():
            lane.load(states[number])
            self.data_step = states[number]["data_step"]

    def fingerprint(self) -> dict[str, str]:
        return self._fingerprint

    def shares(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def build_loader(config: Config, tokenizer: Tokenizer, data_rank: int, data_size: int) -> Loader:
    t = config.training
    size = t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * data_size
    source = build_source(t.dataset, t.dataset_path)
    rows = size // data_size
    seed = config.debug.seed or 0
    mine = range(data_rank * rows, (data_rank + 1) * rows)
    lanes = {j: Lane(source, tokenizer, j, size, t.seq_len, seed) for j in mine}
    return Loader(lanes, {"source": source.fingerprint, "tokenizer": tokenizer.fingerprint, "seed": str(seed), "rows": str(size)})


def build_validation_loader(config: Config, tokenizer: Tokenizer, data_rank: int, data_size: int) -> Iterator[Batch]:
    raise NotImplementedError
