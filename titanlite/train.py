"""The training job: ``main`` starts the world, ``Trainer`` builds everything, resumes, and loops.

    python -m titanlite.train --training.steps=20        # a world of one
    ./run_train.sh                                       # the same, or torchrun over every GPU
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.manager import CheckpointManager, Restored, Snapshot
from titanlite.config import Config, load
from titanlite.data.loader import build_loader
from titanlite.data.tokenizer import build_tokenizer
from titanlite.distributed.elastic import StopRequest, clear_marker, write_marker
from titanlite.distributed.faults import Faults
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.verdict import Verdict, agree
from titanlite.distributed.watchdog import Watchdog
from titanlite.distributed.world import World
from titanlite.errors import TrainingStopped, UserError
from titanlite.evaluate import Validation
from titanlite.garbage import GarbageCollection
from titanlite.models.sizes import sizes_of
from titanlite.monitor import Meter, Monitor
from titanlite.monitor.explain import explain
from titanlite.optim import gradients
from titanlite.optim.optimizer import Optimizers
from titanlite.optim.schedule import lr_factor, schedule_length
from titanlite.parallel.apply import global_batch_size, parallelize
from titanlite.recovery import Recovery


@dataclass
class TrainState:
    """Everything but tensors and lanes that a resumed run needs to be the run that was never stopped."""

    step: int = 0
    data_step: int = 0
    tokens_seen: int = 0
    skips: int = 0
    schedule_length: int = 0


class Trainer:
    """One rank of a training run. Every rank builds the same and loops in step with the others."""

    def __init__(self, config: Config, world: World):
        self.config, self.world = config, world
        self.state = TrainState(schedule_length=schedule_length(config))
        _set_determinism(config)
        self.mesh = Mesh.build(config, world)
        self.tokenizer = build_tokenizer(config.model.hf_assets_path)
        _check_vocabulary(config, self.tokenizer.vocab_size)
        model = parallelize(config, self.mesh, world.device)
        self.parts, self.runner = model.parts, model.runner
        self.optimizers = Optimizers(list(self.parts), config)
        self.loader = build_loader(config, self.tokenizer, self.mesh.data_rank, self.mesh.data_size)
        self.validation = Validation(config, self.tokenizer, self.mesh, world, self.runner)
        self.checkpoints = CheckpointManager(config, world, self.mesh.describe())
        self.monitor = Monitor(config, world, self.mesh.describe())
        self.meter = Meter(config, world, sizes_of(config.model))
        self.recovery = Recovery(config, self.monitor)
        self.faults = Faults(config.debug.faults, world)
        self.stop = StopRequest(config)
        self.watchdog = Watchdog(config, world)
        self.garbage = GarbageCollection(config.training.gc_freq)
        self.nominal_tokens = global_batch_size(config, self.mesh.data_size) * config.training.seq_len
        world.set_timeout(config.comm.train_timeout_seconds)

    def run(self) -> None:
        """Train from the newest intact checkpoint, or the start, to the last step or a request to stop."""
        self.begin()
        while self.goes_on():
            self.step_begins()
            verdict = self.forward_backward()
            match self.recovery.judge(self.state, verdict):
                case "update":
                    self.update(verdict)
                case "skip":
                    self.skip()
                case "rollback":
                    self.roll_back()
            self.record(verdict)
            self.validate()
            self.save(verdict)
        self.finish()

    def begin(self) -> None:
        """Resume, and say what is about to run."""
        clear_marker(self.folder, self.world)
        restored = self.checkpoints.restore(self.snapshot())
        if restored is not None:
            self.follow(restored)
        self.ending = agree(self.world, 0.0, 0, 0.0, False, not self.loader.has_next(), 0.0, 1).data_ended
        self.monitor.start(self.state.step, {"note": restored.note if restored else "", "tokens_per_step": self.nominal_tokens})
        if self.config.checkpoint.create_seed_checkpoint:
            self.checkpoints.save(0, self.snapshot, last=True)
            self.ending = True

    def goes_on(self) -> bool:
        """Whether there is another step: the steps are not done, nobody asked to stop, no rank's data ended."""
        return self.state.step < self.config.training.steps and not self.ending

    def step_begins(self) -> None:
        """Start the clocks of a step, and let injected faults strike."""
        self.meter.step_begins()
        self.watchdog.beat(self.state.step + 1)
        self.garbage.step(self.state.step)
        self.faults.before_step(self.state.step + 1)

    def forward_backward(self) -> Verdict:
        """Take the next rows, accumulate their gradients, and agree with all ranks on what came out."""
        with self.meter.waiting_for_data():
            batch = self.loader.next()
        self.optimizers.zero_grad()
        loss = self.runner.forward_backward(batch, 1.0 / self.nominal_tokens)
        loss = self.faults.corrupt(self.state.step + 1, loss)
        return agree(
            self.world,
            loss if self.mesh.is_first_of("tp") else 0.0,
            batch.counted_tokens() if self.mesh.is_first_of("tp", "cp", "pp") else 0,
            gradients.square_norm(self.optimizers.parameters(), self.world.size // self.mesh.pp),
            stop=bool(self.stop.requested),
            data_ended=not self.loader.has_next(),
            seconds=self.meter.own_seconds(),
            nominal_tokens=self.nominal_tokens,
        )

    def update(self, verdict: Verdict) -> None:
        """Clip the gradients and step the optimizer."""
        clip = gradients.clip_factor(verdict.grad_norm, self.config.training.max_norm)
        gradients.scale(self.optimizers.parameters(), clip * self.nominal_tokens / verdict.tokens)
        self.optimizers.step(lr_factor(self.state.step + 1, self.config))
        self.advance(verdict.tokens)

    def skip(self) -> None:
        """Leave the weights as they are and go on with the next rows."""
        self.state.skips += 1
        self.advance(0)

    def advance(self, tokens: int) -> None:
        """Count a step."""
        self.state.step += 1
        self.state.data_step = self.loader.data_step
        self.state.tokens_seen += tokens

    def roll_back(self) -> None:
        """Return to the newest good checkpoint, and go on with the rows after those that went wrong."""
        past, skips = self.loader.data_step, self.state.skips + 1
        self.checkpoints.wait()
        restored = self.checkpoints.restore(self.snapshot())
        if restored is None:
            raise TrainingStopped(f"step {self.state.step + 1} went wrong and there is no checkpoint to roll back to")
        self.follow(restored)
        self.loader.skip(past - self.loader.data_step)
        self.state.skips, self.state.data_step = skips, self.loader.data_step

    def record(self, verdict: Verdict) -> None:
        """Measure the step, and log it where it is due."""
        self.ending = verdict.stop or verdict.data_ended
        self.meter.step_ends(verdict)
        if self.monitor.due(self.state.step, self.ending):
            rate = self.config.optimizer.lr * lr_factor(self.state.step, self.config)
            self.monitor.record(self.meter.summary(self.state, verdict, rate))

    def validate(self) -> None:
        """Evaluate on the validation data where it is due."""
        if self.validation.due(self.state.step):
            self.monitor.validation(self.state.step, self.validation.loss())

    def save(self, verdict: Verdict) -> None:
        """Publish a checkpoint where it is due, and hear how the one before ended."""
        self.checkpoints.poll()
        if self.checkpoints.due(self.state.step) and verdict.finite:
            self.meter.checkpoint_stalled(self.checkpoints.save(self.state.step, self.snapshot))

    def finish(self) -> None:
        """Save the last state, wait until it is published, and say where everything is."""
        if self.config.checkpoint.enable and self.state.step and not self.config.checkpoint.create_seed_checkpoint:
            self.checkpoints.save(self.state.step, self.snapshot, last=True)
        self.checkpoints.wait()
        if self.stop.requested:
            write_marker(self.folder, self.stop.requested, self.state.step, self.world)
        self.monitor.finish(self.state.step)
        if self.state.step < self.config.training.steps and self.ending and not self.stop_agreed:
            raise TrainingStopped(f"the data ended after step {self.state.step} of {self.config.training.steps}")

    def snapshot(self) -> Snapshot:
        """This rank's live state, for saving or to be filled."""
        speaks = self.mesh.is_first_of("tp", "cp", "pp")
        return Snapshot(
            model={name: tensor for part in self.parts for name, tensor in part.state_dict().items()},
            optimizer=self.optimizers.named_state(),
            train_state=asdict(self.state),
            lanes=self.loader.lane_states() if speaks else {},
            identity=self.identity(),
        )

    def identity(self) -> dict[str, str]:
        """What a checkpoint must have in common with the run that loads it."""
        sizes = asdict(sizes_of(self.config.model))
        model = {f"model.{name}": str(value) for name, value in sizes.items() if name != "init_std"}
        return model | {f"data.{name}": value for name, value in self.loader.fingerprint().items()}

    def follow(self, restored: Restored) -> None:
        """Go on where a checkpoint stands."""
        if restored.train_state:
            self.state = TrainState(**restored.train_state)
        if restored.lanes:
            self.loader.load_lane_states(restored.lanes)

    def close(self) -> None:
        """Let go of threads, signal handlers and files."""
        self.watchdog.close()
        self.stop.close()
        self.loader.close()
        self.validation.close()
        self.checkpoints.close()
        self.monitor.close()
        self.garbage.close()


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; returns the exit code: 0 done, 2 wrong input, 3 could not go on."""
    try:
        config = load(argv)
        world = World.start(config.comm)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
