"""One place that the trainer talks to; one rank that writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config import show
from titanlite.monitor.console import Console
from titanlite.monitor.journal import Journal
from titanlite.monitor.tensorboard import TensorBoard
from titanlite.plan import face

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.world import World
    from titanlite.monitor.profiler import Profiler

SLOW = 0.2
"""Share of a step that a rank may lag behind the others before it is named."""

COMPARED_AFTER = 10
"""Steps after which the plan's numbers are put beside the measured ones."""


class Monitor:
    """Console, metrics.jsonl and TensorBoard of a run.

    Rank 0 writes, whatever the layout: the verdict of a step brings it the loss even where it is computed elsewhere.
    With ``metrics.save_for_all_ranks`` the others write event files of their own.
    """

    def __init__(self, config: Config, world: World, folder: Path):
        self.config, self.world, self.folder = config, world, folder
        self.console: Console | None = None
        self.journal: Journal | None = None
        self.board: TensorBoard | None = None
        self.profiler: Profiler | None = None
        self.began: int | None = None
        if config.profiling.enable_profiling or config.profiling.enable_memory_snapshot:
            from titanlite.monitor.profiler import Profiler

            self.profiler = Profiler(config, world, folder)

    def start(self, step: int, facts: dict[str, Any]) -> None:
        """Open the files of a run that goes on after ``step``, and print ``facts``."""
        settings = self.config.metrics
        self.began = step
        first = self.world.rank == 0
        if first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in filter(None, ("config.toml", self.config.job.save_config_file)):
                (self.folder / name).write_text(show.toml_text(self.config))
            self.journal = Journal(self.folder / "metrics.jsonl", step)
            self.console = Console(self.config.training.steps, not settings.disable_color_printing)
            self.console.start(step, facts)
        if settings.enable_tensorboard and (first or settings.save_for_all_ranks):
            board = self.folder / settings.save_tb_folder
            place = board / f"rank_{self.world.rank}" if settings.save_for_all_ranks else board
            self.board = TensorBoard(place, step, show.toml_text(self.config))

    def due(self, step: int, last: bool) -> bool:
        """Whether ``step`` is logged: the first, every ``metrics.log_freq``th, and the last."""
        return step == 1 or last or step % self.config.metrics.log_freq == 0 or self.norms_due(step)

    def norms_due(self, step: int) -> bool:
        """Whether the norms by block of ``step`` are recorded."""
        every = self.config.metrics.norms_freq
        return every > 0 and step % every == 0

    def step_ends(self, first_step_seconds: float | None) -> None:
        """A step has ended, logged or not; of the first step with how long it took."""
        if first_step_seconds is not None and self.config.compile.enable:
            self.event(1, "compile", f"the first step took {first_step_seconds:.1f} s, compilation included")
        if self.profiler is not None:
            self.profiler.step()

    def record(self, line: dict[str, Any]) -> None:
        """Log a step."""
        if self.journal is not None:
            self.journal.write(line)
        if self.console is not None:
            self.console.step(line)
            self._beside_the_plan(line)
            lag = line.get("slowest_rank_lag_seconds", 0.0)
            if lag > SLOW * line.get("step_seconds", 0.0):
                self.console.say(
                    f"step {line['step']}  rank {line['slowest_rank']} is slow: {lag:.2f} s behind the mean"
                )
        if self.board is not None:
            self.board.write(line)

    def _beside_the_plan(self, line: dict[str, Any]) -> None:
        """Once, after ten steps: what the plan said of a GPU beside what was measured."""
        if self.began is None or line["step"] < self.began + COMPARED_AFTER or self.console is None:
            return
        self.began = None
        if self.world.device.type == "cuda":
            import torch

            said = face.predict(self.config, self.world.size, torch.cuda.get_device_name(self.world.device))
            for words in said.beside(line["tokens_per_second_per_device"], line["memory_peak_gib"]):
                self.console.say(words)

    def event(self, step: int, kind: str, text: str) -> None:
        """Log something that happened."""
        if self.journal is not None:
            self.journal.write({"step": step, "event": kind, "text": text})
        if self.console is not None:
            self.console.say(f"step {step}  {kind}: {text}")
        if self.board is not None:
            self.board.event(step, kind, text)

    def finish(self, step: int, checkpoint: str | None) -> None:
        """Say where everything is."""
        if self.console is None:
            return
        self.console.close()
        self.console.say(f"done at step {step}")
        self.console.say(f"metrics      {self.folder / 'metrics.jsonl'}")
        if self.board is not None:
            self.console.say(f"tensorboard  {self.folder / self.config.metrics.save_tb_folder}")
        if checkpoint is not None:
            self.console.say(f"checkpoint   {checkpoint}")

    def close(self) -> None:
        """Close the files."""
        for part in (self.console, self.journal, self.board, self.profiler):
            if part is not None:
                part.close()
