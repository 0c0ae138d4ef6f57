"""Parquet files through pyarrow; a column holds the text."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from titanlite.data.sources import BadRecord, find_files, fingerprint
from titanlite.errors import UserError


class ParquetSource:
    """Rows of Parquet files; row groups that were read last are kept."""

    sequential = True

    def __init__(self, path: str, text_key: str = "text"):
        try:
            import pyarrow.parquet as pq
        except ImportError:
            raise UserError(f"{path} needs the package pyarrow: pip install 'titanlite[data]'") from None
        self.files = find_files(path, ("*.parquet",))
        self.fingerprint = fingerprint(self.files)
        self.text_key = text_key
        self.groups: list[tuple[int, int]] = []
        sizes = []
        self.opened: list[Any] = []
        for number, file in enumerate(self.files):
            try:
                opened = pq.ParquetFile(file)
            except Exception as error:
                raise UserError(f"{file} is not Parquet: {error}") from error
            if text_key not in opened.schema_arrow.names:
                raise UserError(f"{file} has no column {text_key!r}, but {', '.join(opened.schema_arrow.names)}")
            self.opened.append(opened)
            for group in range(opened.num_row_groups):
                self.groups.append((number, group))
                sizes.append(opened.metadata.row_group(group).num_rows)
        self.ends = np.cumsum(sizes) if sizes else np.zeros(1, dtype=np.int64)
        self._rows = lru_cache(maxsize=8)(self._read)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def document(self, index: int) -> str:
        """The text of a row."""
        group = int(np.searchsorted(self.ends, index, side="right"))
        row = index - (int(self.ends[group - 1]) if group else 0)
        text = self._rows(group)[row].as_py()
        if not isinstance(text, str):
            raise BadRecord(f"{self.files[self.groups[group][0]]}: row {row + 1} of group {group} has no text")
        return text

    def _read(self, group: int) -> Any:
        number, inside = self.groups[group]
        return self.opened[number].read_row_group(inside, columns=[self.text_key]).column(0)
