"""Documents of one lane, in order, from one source or a weighted mixture.

Lane j of B takes documents j, j + B, j + 2B, ... of each source's shuffled order, so lanes never share a document within
an epoch, and a lane's documents do not depend on which rank it lives on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from titanlite.data.order import Order
from titanlite.data.sources import BadRecord, Source
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import UserError


@dataclass
class Part:
    """A source with its share of the tokens."""

    name: str
    source: Source
    weight: float

    @property
    def sequential(self) -> bool:
        """Whether the source is read fast only in its own order."""
        return getattr(self.source, "sequential", False)


@dataclass(slots=True)
class Document:
    """Tokens of one document, and where they came from: the ``position`` in the order of part number ``part``."""

    part: int
    position: int
    tokens: np.ndarray


class Documents:
    """The documents of one lane.

    Attributes:
        positions: of the next document of each part, in the part's shuffled order.
        taken: tokens given out of each part; the part that is furthest behind its weight comes next.
    """

    def __init__(self, parts: list[Part], tokenizer: Tokenizer, lane: int, lanes: int, settings: Settings):
        self.parts, self.tokenizer, self.lanes, self.settings = parts, tokenizer, lanes, settings
        self.positions = [lane] * len(parts)
        self.taken = [0] * len(parts)
        self.skipped = self.skipped_in_turn = 0
        whole = sum(part.weight for part in parts)
        self.weights = [part.weight / whole for part in parts]
        self._orders = [
            Order(len(p.source), settings.seed, settings.shuffle, settings.window if p.sequential else None, lanes)
            for p in parts
        ]
        self._lengths = [len(part.source) for part in parts]

    def next(self) -> Document | None:
        """The next document; None where a part's last epoch is over and the data do not loop."""
        while True:
            part = self._furthest_behind()
            position = self.positions[part]
            if not self.settings.loop and position >= self._lengths[part]:
                return None
            self.positions[part] += self.lanes
            try:
                document = self.read(part, position)
            except BadRecord as bad:
                if self.settings.on_bad_record == "stop":
                    raise UserError(f"{bad}; data.on_bad_record = 'skip' goes on without it") from bad
                self.skipped += 1
                self.skipped_in_turn += 1
                if self.skipped_in_turn > len(self.parts[part].source):
                    raise UserError(f"no record of {self.parts[part].name} can be read; the last: {bad}") from bad
                continue
            self.skipped_in_turn = 0
            self.taken[part] += len(document.tokens)
            return document

    def read(self, part: int, position: int) -> Document:
        """A document by its place, again and again the same."""
        source = self.parts[part].source
        content = source.document(self._orders[part].at(position))
        if isinstance(content, np.ndarray):
            return Document(part, position, content)
        text = self.tokenizer.encode(content)
        bos = self.tokenizer.bos_id
        tokens = np.empty(len(text) + (bos is not None) + 1, dtype=np.int64)
        if bos is not None:
            tokens[0] = bos
        tokens[(bos is not None) : -1] = text
        tokens[-1] = self.tokenizer.eos_id
        return Document(part, position, tokens)

    def state(self) -> dict[str, Any]:
        """Where this lane stands, as JSON."""
        return {"positions": list(self.positions), "taken": list(self.taken), "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """Stand where ``state`` was taken."""
        self.positions, self.taken, self.skipped = list(state["positions"]), list(state["taken"]), state["skipped"]

    def _furthest_behind(self) -> int:
        if len(self.parts) == 1:
            return 0
        whole = sum(self.taken) + 1
        return max(range(len(self.parts)), key=lambda i: (self.weights[i] - self.taken[i] / whole, -i))


@dataclass(frozen=True)
class Settings:
    """What of ``[data]`` and ``[debug]`` decides a lane's documents; ``window`` is data.shuffle_buffer."""

    seed: int = 0
    shuffle: bool = True
    loop: bool = True
    on_bad_record: str = "stop"
    window: int = 1000
