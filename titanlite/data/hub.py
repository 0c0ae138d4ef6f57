"""Hugging Face datasets on disk, through the optional package ``datasets``; nothing is downloaded unless it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlite.data.sources import BadRecord
from titanlite.errors import UserError


class HubSource:
    """A split of a dataset: a folder that ``save_to_disk`` wrote, or a name that ``load_dataset`` knows."""

    def __init__(self, path: str, text_key: str = "text"):
        try:
            import datasets
        except ImportError:
            raise UserError("dataset hf needs the package datasets: pip install 'titanlite[hf]'") from None
        try:
            if Path(path).exists():
                loaded: Any = datasets.load_from_disk(path)
            else:
                loaded = datasets.load_dataset(path)
        except Exception as error:
            raise UserError(f"dataset {path} cannot be opened: {error}") from error
        self.rows = loaded["train"] if isinstance(loaded, dict) else loaded
        if text_key not in self.rows.column_names:
            raise UserError(f"dataset {path} has no column {text_key!r}, but {', '.join(self.rows.column_names)}")
        self.path, self.text_key = path, text_key
        self.fingerprint = str(self.rows._fingerprint)

    def __len__(self) -> int:
        return len(self.rows)

    def document(self, index: int) -> str:
        """The text of a row."""
        text = self.rows[index][self.text_key]
        if not isinstance(text, str):
            raise BadRecord(f"{self.path}: row {index} has no text")
        return text
