"""metrics.jsonl: one JSON object a line, appended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Journal:
    """Appends lines; what a later start repeats is cut away first, so that steps never come twice."""

    def __init__(self, file: Path, step: int):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            _cut_after(file, step)
        self.file = file.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one line, at once."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _cut_after(file: Path, step: int) -> None:
    """Keep the whole lines of steps up to ``step``; a crash may have left a half one at the end."""
    kept = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line.get("step", 0) <= step:
            kept.append(text + "\n")
    staged = file.with_suffix(".tmp")
    staged.write_text("".join(kept), encoding="utf-8")
    staged.replace(file)
