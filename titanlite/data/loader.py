"""Batches of one data-parallel rank's rows, made ahead of the step on a thread, with an exact state."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titanlite.data.batch import IGNORED, Batch
from titanlite.data.mixture import Documents, Part, Settings
from titanlite.data.packing import Lane, Row
from titanlite.data.sources import build_source
from titanlite.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from titanlite.config import Config

STOP_WAIT = 0.2


class DataEnded(Exception):
    """There is no further batch; ``Loader.has_next`` tells before."""


@dataclass
class _Made:
    """A batch with the state of the lanes after it, or what came instead."""

    batch: Batch | None
    states: dict[int, Any]
    error: BaseException | None = None


class Loader:
    """The rows of one data-parallel rank, data step after data step.

    Batches are made by a thread up to ``prefetch`` steps ahead; ``lane_states`` is that of the last batch taken,
    whatever was made ahead. Making a batch touches Python objects, but tokenizers and copies release the interpreter.

    Attributes:
        data_step: batches taken since the start of the run.
    """

    def __init__(
        self,
        lanes: dict[int, Lane],
        fingerprint: dict[str, str],
        names: list[str],
        prefetch: int,
        pin: bool = False,
    ):
        self.lanes, self._fingerprint, self.names = lanes, fingerprint, names
        self.prefetch, self.pin = prefetch, pin
        self.data_step = 0
        self._states = {number: lane.state() for number, lane in lanes.items()}
        self._head: _Made | None = None
        self._queue: queue.Queue[_Made] = queue.Queue(maxsize=max(prefetch, 1))
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def has_next(self) -> bool:
        """Whether ``next`` has a batch; waits until it is made. Errors of making it are raised here or by ``next``."""
        if self._head is None:
            self._head = self._take()
        return self._head.batch is not None or self._head.error is not None

    def next(self) -> Batch:
        """The next batch.

        Raises:
            DataEnded: there is none.
        """
        made = self._head or self._take()
        self._head = None
        if made.batch is None:
            # The thread has ended with it, so every further call is answered the same.
            self._head = made
            raise made.error or DataEnded
        self._states = made.states
        self.data_step += 1
        return made.batch

    def skip(self, steps: int) -> None:
        """Pass over so many batches."""
        for _ in range(steps):
            self.next()

    def lane_states(self) -> dict[int, Any]:
        """Where each lane of this rank stands, by lane number, as JSON."""
        return {number: {"data_step": self.data_step, **state} for number, state in self._states.items()}

    def load_lane_states(self, states: dict[int, Any]) -> None:
        """Stand where ``states`` were taken, on whatever ranks; other lanes than this rank's are passed over."""
        self._stop()
        for number, lane in self.lanes.items():
            lane.load(states[number])
            self.data_step = states[number]["data_step"]
        self._states = {number: lane.state() for number, lane in self.lanes.items()}

    def fingerprint(self) -> dict[str, str]:
        """What the rows depend on, by name: a resumed run must have the same."""
        return dict(self._fingerprint)

    def shares(self) -> dict[str, float]:
        """Share of each source in the tokens taken so far by this rank's lanes."""
        taken = np.sum([state["taken"] for state in self._states.values()], axis=0)
        return dict(zip(self.names, (taken / max(taken.sum(), 1)).tolist(), strict=True))

    def skipped(self) -> int:
        """Records that could not be read and were passed over."""
        return sum(state["skipped"] for state in self._states.values())

    def facts(self) -> dict[str, float]:
        """What is logged of the data, over this rank's lanes: the epoch, records skipped, and each source's share."""
        facts: dict[str, float] = {"epoch": self.epoch(), "records_skipped": self.skipped()}
        if len(self.names) > 1:
            facts |= {f"data_share/{name}": share for name, share in self.shares().items()}
        return facts

    def epoch(self) -> int:
        """Epochs that the lane that is furthest has finished, in the batches taken so far."""
        lengths = [len(part.source) for lane in self.lanes.values() for part in lane.documents.parts]
        positions = [position for state in self._states.values() for position in state["positions"]]
        return max(position // length for position, length in zip(positions, lengths, strict=True))

    def close(self) -> None:
        """End the thread."""
        self._stop()

    def _take(self) -> _Made:
        if self.prefetch == 0:
            return self._make()
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
            self._thread.start()
        return self._queue.get()

    def _run(self) -> None:
        while not self._ended.is_set():
            made = self._make()
            while not self._ended.is_set():
                try:
                    self._queue.put(made, timeout=STOP_WAIT)
                    break
                except queue.Full:
                    continue
            if made.batch is None:
                return

    def _make(self) -> _Made:
        try:
            rows = [lane.row() for lane in self.lanes.values()]
            if any(row is None for row in rows):
                return _Made(None, {})
            states = {number: lane.state() for number, lane in self.lanes.items()}
            return _Made(self._batch([row for row in rows if row is not None]), states)
        except BaseException as error:
            return _Made(None, {}, error)

    def _batch(self, rows: list[Row]) -> Batch:
        tensors = [torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)]
        if self.pin:
            tensors = [tensor.pin_memory() for tensor in tensors]
        return Batch(*tensors)

    def _stop(self) -> None:
        if self._thread is not None:
            self._ended.set()
            with contextlib.suppress(queue.Empty):
                while True:  # room for what the thread holds, so that it need not wait before it ends
                    self._queue.get_nowait()
            self._thread.join()
            self._thread = None
        self._queue = queue.Queue(maxsize=max(self.prefetch, 1))
        self._head = None


def build_loader(config: Config, tokenizer: Tokenizer, data_rank: int, data_size: int) -> Loader:
    """The training rows of data-parallel rank ``data_rank`` of ``data_size``."""
    training, data = config.training, config.data
    size = _global_batch_size(config, data_size)
    wanted = data.sources
    if wanted:
        parts = [Part(s.name, build_source(s.dataset, s.path, tokenizer, s.text_key), s.weight) for s in wanted]
    else:
        source = build_source(training.dataset, training.dataset_path, tokenizer)
        parts = [Part(training.dataset, source, 1.0)]
    seed = config.debug.seed or 0
    settings = Settings(seed, data.shuffle, data.on_end == "loop", data.on_bad_record, data.shuffle_buffer)
    rows = size // data_size
    lanes = {
        lane: Lane(
            Documents(parts, tokenizer, lane, size, settings),
            training.seq_len,
            training.pack_documents,
            data.packing == "best_fit",
            training.document_mask,
        )
        for lane in range(data_rank * rows, (data_rank + 1) * rows)
    }
    fingerprint = {
        "tokenizer": tokenizer.fingerprint,
        "seed": str(seed),
        "global_batch_size": str(size),
        "seq_len": str(training.seq_len),
        "packing": f"{data.packing} pack={training.pack_documents} mask={training.document_mask} shuffle={data.shuffle}"
        f" buffer={data.shuffle_buffer}",
        **{f"source {part.name}": part.source.fingerprint for part in parts},
        **({f"weight {part.name}": repr(part.weight) for part in parts} if wanted else {}),
    }
    pin = torch.cuda.is_available()
    return Loader(lanes, fingerprint, [part.name for part in parts], data.prefetch, pin)


def _global_batch_size(config: Config, data_size: int) -> int:
    training = config.training
    return training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * data_size


class ValidationRows:
    """The batches of one validation: the same ``count`` rows every time, or all (None), dealt to the ranks in turn.

    All ranks give the same number of batches of ``local`` rows; where the rows are used up, others that count nothing
    fill the last batch.
    """

    def __init__(self, lane: Lane, local: int, data_rank: int, data_size: int, count: int | None):
        self.lane, self.local, self.data_rank, self.data_size, self.count = lane, local, data_rank, data_size, count

    def __iter__(self) -> Iterator[Batch]:
        rows = self._rows()
        while chunk := list(islice(rows, self.local * self.data_size)):
            own = chunk[self.data_rank * self.local : (self.data_rank + 1) * self.local]
            own += [self._nothing()] * (self.local - len(own))
            tensors = [torch.from_numpy(np.stack(column)) for column in zip(*own, strict=True)]
            yield Batch(*tensors)

    def close(self) -> None:
        """Nothing is open."""

    def _rows(self) -> Iterator[Row]:
        given = 0
        while given != self.count and (row := self.lane.row()) is not None:
            given += 1
            yield row
        if given != self.count and (row := self.lane.rest()) is not None:
            yield row

    def _nothing(self) -> Row:
        zeros = np.zeros(self.lane.seq_len, dtype=np.int64)
        row = (zeros, zeros + IGNORED, zeros, zeros)
        return row if self.lane.mask else row[:2]


def build_validation_loader(config: Config, tokenizer: Tokenizer, data_rank: int, data_size: int) -> ValidationRows:
    """The validation rows of data-parallel rank ``data_rank`` of ``data_size``, from the beginning.

    ``validation.steps`` counts in global batches of training, so that the rows are the same on every layout.
    """
    wanted = config.validation
    source = build_source(wanted.dataset, wanted.dataset_path, tokenizer)
    settings = Settings(shuffle=False, loop=wanted.steps != -1, on_bad_record=config.data.on_bad_record)
    documents = Documents([Part(wanted.dataset, source, 1.0)], tokenizer, 0, 1, settings)
    lane = Lane(documents, wanted.seq_len, config.training.pack_documents, False, config.training.document_mask)
    count = None if wanted.steps == -1 else wanted.steps * _global_batch_size(config, data_size)
    return ValidationRows(lane, wanted.local_batch_size, data_rank, data_size, count)
