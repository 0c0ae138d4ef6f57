"""TensorBoard event files; the tags are the names of metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NOT_CURVES = ("step", "time")


class TensorBoard:
    """Writes event files; the import waits for the first line, since it costs a second and more."""

    def __init__(self, folder: Path, step: int, config_text: str):
        self.folder, self.step, self.config_text = folder, step, config_text
        self._writer: SummaryWriter | None = None

    @property
    def writer(self) -> SummaryWriter:
        """The writer; what an earlier start wrote beyond this one's first step is hidden."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self.step + 1)
            self._writer.add_text("config", f"```toml\n{self.config_text}\n```", self.step)
        return self._writer

    def write(self, line: dict[str, Any]) -> None:
        """A step's numbers."""
        for name, value in line.items():
            if name not in NOT_CURVES and isinstance(value, int | float):
                self.writer.add_scalar(name, value, line["step"])

    def event(self, step: int, kind: str, text: str) -> None:
        """Something that happened, as text."""
        self.writer.add_text(f"events/{kind}", text, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
