"""The training job: ``main`` starts the world, ``Trainer`` builds everything, resumes, and loops.

python -m titanlite.train --training.steps=20        # a world of one
./run_train.sh                                       # the same, or torchrun over every GPU
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from titanlite.checkpoint.manager import CheckpointManager, Restored, Snapshot
from titanlite.config import Config, load
from titanlite.data.loader import build_loader
from titanlite.data.tokenizer import build_tokenizer
from titanlite.distributed import elastic
from titanlite.distributed.faults import Faults
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.verdict import Verdict, agree
from titanlite.distributed.watchdog import Watchdog
from titanlite.distributed.world import World
from titanlite.ending import ending
from titanlite.errors import TrainingStopped, UserError
from titanlite.evaluate import Validation
from titanlite.garbage import GarbageCollection
from titanlite.models.sizes import sizes_of
from titanlite.monitor import Meter, Monitor
from titanlite.monitor.facts import facts
from titanlite.monitor.norms import by_block
from titanlite.optim import gradients
from titanlite.optim.loss_scale import LossScale
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
    loss_scale: float = 1.0
    good_steps: int = 0
    loss_mean: float = 0.0


class Trainer:
    """One rank of a training run. Every rank builds the same and loops in step with the others."""

    def __init__(self, config: Config, world: World):
        self.config, self.world = config, world
        self.folder = run_folder(config)
        self.loss_scale = LossScale(config.training.mixed_precision_param == "float16")
        self.state = TrainState(schedule_length=schedule_length(config), loss_scale=self.loss_scale.initial())
        self.running = 0
        self.stopping = self.data_ended = False
        set_determinism(config)

        self.mesh = Mesh.build(config, world)
        self.tokenizer = build_tokenizer(config.model.hf_assets_path)
        check_vocabulary(config, self.tokenizer.vocab_size)
        model = parallelize(config, self.mesh, world.device)
        self.parts, self.runner, self.after_update = model.parts, model.runner, model.after_update
        self.optimizers = Optimizers(list(self.parts), config)
        self.loader = build_loader(config, self.tokenizer, self.mesh.data_rank, self.mesh.data_size)
        self.nominal_tokens = global_batch_size(config, self.mesh.data_size) * config.training.seq_len

        self.validation = Validation(config, self.tokenizer, self.mesh, world, self.runner)
        self.checkpoints = CheckpointManager(config, world, self.mesh.describe(), self.folder)
        self.monitor = Monitor(config, world, self.folder)
        self.meter = Meter(config, world, sizes_of(config.model))
        self.recovery = Recovery(config, self.monitor, self.loss_scale)
        self.faults = Faults(config.debug.faults, world)
        self.stop = elastic.StopRequest(config)
        self.watchdog = Watchdog(config, world, self.folder)
        self.garbage = GarbageCollection(config.training.gc_freq)
        world.set_timeout(config.comm.train_timeout_seconds)

    def run(self) -> None:
        """Train from the newest intact checkpoint, or the start, to the last step or a request to stop."""
        self.begin()
        while self.goes_on():
            self.step()
        self.finish()

    def step(self) -> None:
        """One step: forward and backward, the verdict of all ranks, and what it asks for."""
        self.step_begins()
        verdict = self.forward_backward()
        match self.recovery.judge(self.running, verdict, self.state):
            case "update":
                self.update(verdict)
            case "skip":
                self.skip()
            case "rollback":
                self.roll_back()
        self.record(verdict, self.validate())
        self.save(verdict)

    def begin(self) -> None:
        """Resume, agree that there is something to do, and say what is about to run."""
        restored = self.checkpoints.restore(self.snapshot())
        if restored is not None:
            self.follow(restored)
        elastic.clear_marker(self.folder, self.world)
        ready = agree(self.world, 0.0, 0, 0.0, bool(self.stop.requested), not self.loader.has_next(), 0.0, 1)
        self.stopping, self.data_ended = ready.stop, ready.data_ended
        start = restored.note if restored is not None else ""
        self.monitor.start(self.state.step, facts(self.config, self.world, self.mesh, self.nominal_tokens, start))

    def goes_on(self) -> bool:
        """Whether there is another step: steps are left, nobody was asked to stop, no rank's data ended."""
        left = self.state.step < self.config.training.steps and not self.config.checkpoint.create_seed_checkpoint
        return left and not self.stopping and not self.data_ended

    def step_begins(self) -> None:
        """Start the clocks of a step, and let injected faults strike."""
        self.running = self.state.step + 1
        self.meter.step_begins()
        self.watchdog.beat(self.running)
        self.garbage.step(self.state.step)
        self.faults.before_step(self.running)

    @property
    def lr_factor(self) -> float:
        """What the learning rate of the step that runs is multiplied by."""
        return lr_factor(self.running, self.config)

    def forward_backward(self) -> Verdict:
        """Take the next rows, accumulate their gradients, and agree with all ranks on what came out."""
        with self.meter.waiting_for_data():
            batch = self.loader.next()
        self.optimizers.begin(self.lr_factor)
        loss = self.runner.forward_backward(batch, self.state.loss_scale / self.nominal_tokens)
        loss = self.faults.corrupt(self.running, loss)
        with self.meter.waiting_for_data():
            data_ended = not self.loader.has_next()
        return agree(
            self.world,
            # Ranks that differ only in tp know the same loss, and pipeline ranks without the head report zero.
            loss if self.mesh.is_first_of("tp") else 0.0,
            batch.counted_tokens() if self.mesh.is_first_of("tp", "cp", "pp") else 0,
            self.optimizers.square_norm(self.world.size // self.mesh.pp) / self.state.loss_scale**2,
            stop=bool(self.stop.requested),
            data_ended=data_ended,
            seconds=self.meter.own_seconds(),
            nominal_tokens=self.nominal_tokens,
        )

    def update(self, verdict: Verdict) -> None:
        """Clip the gradients and step the optimizer."""
        clip = gradients.clip_factor(verdict.grad_norm, self.config.training.max_norm)
        correction = self.nominal_tokens / verdict.tokens / self.state.loss_scale
        gradients.scale(self.optimizers.parameters(), clip * correction)
        self.optimizers.step()
        self.after_update()
        self.advance(verdict.tokens)

    def skip(self) -> None:
        """Leave the weights as they are and go on with the next rows."""
        self.advance(0)

    def advance(self, tokens: int) -> None:
        """Count a step."""
        self.state.step += 1
        self.state.data_step = self.loader.data_step
        self.state.tokens_seen += tokens

    def roll_back(self) -> None:
        """Return to the newest good checkpoint, and go on with the rows after those that went wrong."""
        self.watchdog.pause()
        past, skips = self.loader.data_step, self.state.skips
        self.checkpoints.wait()
        restored = self.checkpoints.restore(self.snapshot())
        if restored is None:
            raise TrainingStopped(f"step {self.running} went wrong and there is no checkpoint to roll back to")
        self.follow(restored)
        self.loader.skip(past - self.loader.data_step)
        self.state.skips, self.state.data_step = skips, self.loader.data_step

    def record(self, verdict: Verdict, validated: dict[str, float]) -> None:
        """Measure the step, and log it where it is due, with what its validation found."""
        self.stopping, self.data_ended = verdict.stop, verdict.data_ended
        self.meter.step_ends(verdict)
        self.monitor.step_ends(self.meter.first_step_seconds())
        rolled_back = self.state.step < self.running
        if not rolled_back and self.monitor.due(self.state.step, last=not self.goes_on() or bool(validated)):
            state, rate = self.state, self.config.optimizer.lr * self.lr_factor
            line = self.meter.summary(state.step, state.data_step, state.tokens_seen, verdict, rate)
            self.monitor.record(line | self.loader.facts() | self.norms() | validated)

    def norms(self) -> dict[str, float]:
        """Norms by block, on steps where ``metrics.norms_freq`` asks for them."""
        if not self.monitor.norms_due(self.state.step):
            return {}
        replicas = self.world.size // self.mesh.pp
        return by_block(self.optimizers.named.items(), sizes_of(self.config.model).n_layers, replicas, self.world)

    def validate(self) -> dict[str, float]:
        """The loss on the validation data, on steps where it is due."""
        if self.state.step < self.running or not self.validation.due(self.state.step):
            return {}
        self.watchdog.pause()
        return {"validation_loss": self.validation.loss()}

    def save(self, verdict: Verdict) -> None:
        """Publish a checkpoint where it is due, and hear how the one before ended."""
        self.checkpoints.poll()
        if self.state.step == self.running and self.checkpoints.due(self.state.step) and verdict.finite:
            self.watchdog.pause()
            self.meter.checkpoint_stalled(self.checkpoints.save(self.state.step, self.snapshot))

    def finish(self) -> None:
        """Save the last state, wait until it is published, and say where everything is."""
        self.watchdog.pause()
        self.checkpoints.save(self.state.step, self.snapshot, last=True)
        self.checkpoints.wait()
        if self.stopping:
            elastic.write_marker(self.folder, self.stop.requested, self.state.step, self.world)
        self.monitor.finish(self.state.step, self.checkpoints.newest())
        if self.data_ended and not self.stopping and self.state.step < self.config.training.steps:
            raise TrainingStopped(
                f"the data ended after step {self.state.step} of {self.config.training.steps}; "
                "data.on_end = 'loop' goes on with the next epoch"
            )

    def snapshot(self) -> Snapshot:
        """This rank's live state, for saving or to be filled."""
        return Snapshot(
            model=dict(self.optimizers.named),
            optimizer=self.optimizers.named_state(),
            train_state=asdict(self.state),
            # Ranks that differ only in tp, cp or pp work on the same rows.
            lanes=self.loader.lane_states() if self.mesh.is_first_of("tp", "cp", "pp") else {},
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
            self.state = TrainState(**restored.train_state | {"schedule_length": schedule_length(self.config)})
        if restored.lanes:
            self.loader.load_lane_states(restored.lanes)

    def close(self) -> None:
        """Let go of threads, signal handlers and files."""
        for part in (self.watchdog, self.stop, self.loader, self.checkpoints, self.monitor, self.garbage):
            part.close()


def run_folder(config: Config) -> Path:
    """Where everything that a run leaves is."""
    return Path(config.job.dump_folder) / (config.job.run_id or "")


def set_determinism(config: Config) -> None:
    """Only deterministic algorithms, where ``[debug]`` asks for them."""
    torch.use_deterministic_algorithms(config.debug.deterministic, warn_only=config.debug.deterministic_warn_only)


def check_vocabulary(config: Config, tokens: int) -> None:
    """Refuse a tokenizer with more tokens than the model's embedding has rows."""
    rows = sizes_of(config.model).vocab_size
    if tokens > rows:
        raise UserError(
            f"the tokenizer of model.hf_assets_path has {tokens} tokens, but the model only {rows}: "
            f"set model.vocab_size = {tokens} or more"
        )


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; returns the exit code: 0 done, 2 wrong input, 3 could not go on."""
    with ending() as end:
        config = end.config = load(argv)
        world = end.world = World.start(config.comm)
        trainer = Trainer(config, world)
        try:
            trainer.run()
        finally:
            end.step = trainer.running
            trainer.close()
            del trainer
    return end.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
