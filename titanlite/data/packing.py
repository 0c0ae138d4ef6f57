"""Documents to rows of equal length.

Greedy packing lays the documents of a lane end to end and cuts every ``seq_len`` tokens. A row holds one token more than
it trains on, which comes again as the first of the next row: every token of the stream but the first is predicted once,
none is dropped.

    stream   a a a a e b b e c c c c c e ...         e ends a document
    row 1    a a a a             labels a a a e
    row 2            e b b e     labels b b e c      with document_mask the labels e -> b and e -> c do not count
"""

from __future__ import annotations

from typing import Any

import numpy as np

from titanlite.data.batch import IGNORED
from titanlite.data.mixture import Document, Documents

Row = tuple[np.ndarray, ...]
"""Tokens, labels and, with document_mask, positions within the document and document numbers within the row: int64
[seq_len] each."""

BEST_FIT_WINDOW = 16
"""Documents that best-fit packing chooses from."""


class Lane:
    """One row of the global batch, step after step.

    Args:
        pack: fill rows with several documents; otherwise a document's last row is padded.
        best_fit: among the next documents, place the longest that still fits whole.
        mask: labels do not cross documents.
    """

    def __init__(self, documents: Documents, seq_len: int, pack: bool, best_fit: bool, mask: bool):
        self.documents, self.seq_len = documents, seq_len
        self.pack, self.best_fit, self.mask = pack, best_fit, mask
        self.open: list[tuple[Document, int]] = []
        self._rest: tuple[np.ndarray, list[int]] = np.zeros(0, dtype=np.int64), []

    def row(self) -> Row | None:
        """The next row; None where the lane's documents do not fill one."""
        if not self.pack:
            return self._padded_row()
        need = self.seq_len + 1
        tokens = np.empty(need, dtype=np.int64)
        lengths: list[int] = []
        used = 0
        left: list[tuple[Document, int]] = []
        queue = self.open
        while used < need:
            if not queue:
                queue = self._more(need - used)
                if not queue:
                    self.open = left
                    self._rest = tokens[:used], lengths
                    return None
            document, offset = queue.pop(0)
            length = min(len(document.tokens) - offset, need - used)
            tokens[used : used + length] = document.tokens[offset : offset + length]
            lengths.append(length)
            used += length
            left.append((document, offset + length))
        # The last token is the first of the next row: its document stays open, or opens again, one token earlier.
        document, end = left[-1]
        self.open = [(document, end - 1), *queue]
        return self._row(tokens, lengths)

    def rest(self) -> Row | None:
        """What did not fill a row when ``row`` ended, padded with labels that do not count; None where it is nothing."""
        tokens, lengths = self._rest
        used, need = len(tokens), self.seq_len + 1
        if used < 2:
            return None
        padded = np.full(need, tokens[-1])
        padded[:used] = tokens
        inputs, labels, *others = self._row(padded, [*lengths, need - used])
        labels = labels.copy()
        labels[used - 1 :] = IGNORED
        return inputs, labels, *others

    def state(self) -> dict[str, Any]:
        """Where the lane stands: open documents by place and offset, so that the size does not depend on them."""
        places = [[document.part, document.position, offset] for document, offset in self.open]
        return {"open": places, **self.documents.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Stand where ``state`` was taken; reads the open documents again."""
        self.documents.load(state)
        self.open = [(self.documents.read(part, position), offset) for part, position, offset in state["open"]]

    def _more(self, room: int) -> list[tuple[Document, int]]:
        """The next documents, in the order in which they are laid."""
        if not self.best_fit:
            document = self.documents.next()
            return [] if document is None else [(document, 0)]
        window: list[Document] = []
        while len(window) < BEST_FIT_WINDOW and (document := self.documents.next()) is not None:
            window.append(document)
        order: list[Document] = []
        while window:
            fitting = [document for document in window if len(document.tokens) <= room]
            chosen = max(fitting, key=lambda d: len(d.tokens)) if fitting else max(window, key=lambda d: len(d.tokens))
            window.remove(chosen)
            order.append(chosen)
            room = (room - len(chosen.tokens)) % self.seq_len or self.seq_len
        return [(document, 0) for document in order]

    def _padded_row(self) -> Row | None:
        while not self.open:
            document = self.documents.next()
            if document is None:
                return None
            if len(document.tokens) > 1:
                self.open = [(document, 0)]
        document, offset = self.open[0]
        piece = document.tokens[offset : offset + self.seq_len + 1]
        used = len(piece) - 1
        end = offset + used
        self.open = [(document, end)] if end < len(document.tokens) - 1 else []
        tokens = np.full(self.seq_len, document.tokens[-1], dtype=np.int64)
        labels = np.full(self.seq_len, IGNORED, dtype=np.int64)
        tokens[:used], labels[:used] = piece[:-1], piece[1:]
        if not self.mask:
            return tokens, labels
        return tokens, labels, np.arange(self.seq_len, dtype=np.int64), np.zeros(self.seq_len, dtype=np.int64)

    def _row(self, tokens: np.ndarray, lengths: list[int]) -> Row:
        if not self.mask:
            return tokens[:-1], tokens[1:]
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        # Positions count from the document's start within this row: a row is all that attention sees.
        positions = np.concatenate([np.arange(length) for length in lengths])
        labels = tokens[1:].copy()
        labels[numbers[1:] != numbers[:-1]] = IGNORED
        return tokens[:-1], labels, positions[:-1], numbers[:-1]
