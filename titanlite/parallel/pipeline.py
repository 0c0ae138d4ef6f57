"""Pipeline parallelism with ``torch.distributed.pipelining``: cutting the model into stages, and running them.

``Pipelined`` has the methods of ``step.Whole``. The last stage computes the summed loss inside its own forward, so what
torch calls the loss function only scales it; nothing is averaged anywhere, and torch's own division of the gradients by
the number of micro-batches is off: it would divide what earlier accumulation rounds left, again in every round.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from titanlite.data.batch import Batch
from titanlite.distributed import private_pipelining as private
from titanlite.errors import UserError
from titanlite.models.decoder import Decoder
from titanlite.models.loss import IGNORED
from titanlite.models.sizes import DecoderSizes, sizes_of
from titanlite.parallel import schedule
from titanlite.parallel.data import DTYPES
from titanlite.parallel.schedule import Action

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.distributed.mesh import Mesh


def split_stages(config: Config, mesh: Mesh, build: Callable[[DecoderSizes], Decoder]) -> list[Decoder]:
    """The stages that this rank runs, in order: decoders without the modules of the other stages.

    Args:
        build: makes the whole decoder; called with the meta device as default, so that dropping most of it is free.

    Raises:
        UserError: the model cannot be cut as the config asks.
    """
    sizes = sizes_of(config.model)
    if sizes.tie_embeddings:
        raise UserError(
            "model.tie_embeddings cannot be used with parallelism.pipeline_parallel_degree > 1: the shared weight "
            "would live on two ranks, the first stage's and the last's"
        )
    modules = schedule.stage_modules(config, sizes.n_layers)
    mine = schedule.stages_of(mesh.rank_in("pp"), len(modules), config.parallelism)
    return [_without_others(build(sizes), set(modules[stage])) for stage in mine]


def _without_others(part: Decoder, names: set[str]) -> Decoder:
    for number in list(part.layers):
        if f"layers.{number}" not in names:
            del part.layers[number]
    for name in ("tok_embeddings", "norm", "output"):
        if name not in names:
            setattr(part, name, None)
    return part


def order(config: Config, rows: int = 0) -> dict[int, list[Action]]:
    """What each pipeline rank does in one round of ``rows`` or local_batch_size, in order, without communication."""
    keys = config.parallelism
    name, ranks = schedule.schedule_name(keys), keys.pipeline_parallel_degree
    micros = schedule.micro_batches(config, rows)
    if name == "csv":
        return schedule.read_csv(keys.pipeline_parallel_schedule_csv)
    if name in schedule.ONE_STAGE:
        return schedule.one_stage_order(name, ranks, micros)
    count = len(schedule.stage_modules(config, sizes_of(config.model).n_layers))
    # torch's schedules lay out their order from the number of stages alone.
    stages: Any = [
        SimpleNamespace(stage_index=i, num_stages=count, group_size=ranks, group_rank=0, submod=nn.Identity())
        for i in schedule.stages_of(0, count, keys)
    ]
    made = _construct(name, stages, micros, None)
    return {rank: list(private.compute_actions(actions)) for rank, actions in made.pipeline_order.items()}


def bubble_fraction(config: Config, rows: int = 0) -> float:
    """The share of a step that the pipeline ranks wait, estimated with equal stages and free communication."""
    return schedule.bubble(order(config, rows))


def describe(config: Config, rows: int = 0) -> str:
    """One line for the start of a run: schedule, stages, micro-batches, and the estimated bubble."""
    count = len(schedule.stage_modules(config, sizes_of(config.model).n_layers))
    name, micros = schedule.schedule_name(config.parallelism), schedule.micro_batches(config, rows)
    waiting = f"ranks wait about {bubble_fraction(config, rows):.0%} of a step"
    return f"{name}, {count} stages, {micros} micro-batches a round, {waiting}"


def _construct(name: str, stages: list[PipelineStage], micros: int, loss: Callable | None) -> Any:
    kind = get_schedule_class(name)
    try:
        return kind(stages[0] if name in schedule.ONE_STAGE else stages, micros, loss_fn=loss, scale_grads=False)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(
            f"schedule {name} cannot run {micros} micro-batches a round (training.local_batch_size over "
            f"parallelism.pipeline_parallel_microbatch_size): {error}"
        ) from None


class Stage(PipelineStage):
    """A pipeline stage that reduces its gradients over the data-parallel ranks in the last accumulation round only.

    ``last_round`` is set before each round.
    """

    last_round = True

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called by every schedule when a round's last backward of this stage is done."""
        if self.last_round:
            super().perform_reduce_grad(grad_scale_factor)


class Pipelined:
    """Forward and backward over a batch through the pipeline.

    Args:
        parts: this rank's stages, ascending, fully parallelised.
        rows: rows of one accumulation round; each round is one run of the schedule.
        finish: called after the last backward, for what is left to do to the gradients.
    """

    def __init__(
        self,
        parts: list[Decoder],
        config: Config,
        mesh: Mesh,
        device: torch.device,
        rows: int,
        finish: Callable[[], None] | None = None,
    ):
        self.parts, self.config, self.mesh, self.device, self.rows, self.finish = (
            parts,
            config,
            mesh,
            device,
            rows,
            finish,
        )
        self.name = schedule.schedule_name(config.parallelism)
        self.micros = schedule.micro_batches(config, rows)
        self.count = len(schedule.stage_modules(config, sizes_of(config.model).n_layers))
        self.numbers = schedule.stages_of(mesh.rank_in("pp"), self.count, config.parallelism)
        self.has_first, self.has_last = 0 in self.numbers, self.count - 1 in self.numbers
        if config.compile.enable and schedule.splits_backward(config.parallelism):
            private.keep_buffers_between_halves_of_backward()
        self.losses: list[Tensor] = []
        self.scale = 1.0
        # Stages are laid out for one shape; validation may use another length.
        self.made: dict[int, tuple[Any, list[Stage]]] = {}

    def forward_backward(self, batch: Batch, scale: float) -> Tensor:
        """Accumulate the gradients of ``scale`` times the summed loss of ``batch``; as ``Whole.forward_backward``.

        Returns that sum, 0-dim fp32; 0 on the ranks that do not have the last stage.
        """
        self.losses, self.scale = [], scale
        rounds = list(self._rounds(batch))
        for i, piece in enumerate(rounds):
            plan, stages = self._schedule(piece.tokens.shape[1])
            for stage in stages:
                stage.last_round = i == len(rounds) - 1
            self._run(plan.step, piece)
        if self.finish is not None:
            self.finish()
        return self._total()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The summed loss of ``batch``, 0-dim fp32, without gradients; 0 without the last stage."""
        self.losses, self.scale = [], 1.0
        for piece in self._rounds(batch):
            plan, _ = self._schedule(piece.tokens.shape[1])
            with private.only_forward(plan):
                self._run(plan.eval, piece)
        return self._total()

    def _run(self, step: Callable, piece: Batch) -> None:
        inputs = {"labels": piece.labels} if self.has_last else {}
        inputs |= {name: value for name in ("positions", "documents") if (value := getattr(piece, name)) is not None}
        step(
            *((piece.tokens,) if self.has_first else ()),
            target=piece.labels if self.has_last else None,
            return_outputs=False,
            **inputs,
        )

    def _total(self) -> Tensor:
        losses, self.losses = self.losses, []
        return torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float32, device=self.device)

    def _rounds(self, batch: Batch):
        for start in range(0, len(batch.tokens), self.rows):
            piece = batch.rows(slice(start, start + self.rows)).to(self.device)
            yield _padded(piece, self.rows)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.losses.append(output.detach().clone())
        return output * self.scale

    def _schedule(self, seq_len: int) -> tuple[Any, list[Stage]]:
        if seq_len not in self.made:
            stages = [self._stage(part, number, seq_len) for part, number in zip(self.parts, self.numbers, strict=True)]
            if self.name == "csv":
                path = self.config.parallelism.pipeline_parallel_schedule_csv
                plan = private.schedule_from_csv(stages, self.micros, self._loss, path or "")
            else:
                plan = _construct(self.name, stages, self.micros, self._loss)  # type: ignore[arg-type]
            self.made[seq_len] = plan, stages
        return self.made[seq_len]

    def _stage(self, part: Decoder, number: int, seq_len: int) -> Stage:
        # Told the shapes, torch does not run the model once to find them, and again after each validation.
        rows, dim = self.rows // self.micros, part.sizes.dim
        hidden = torch.empty(
            rows, seq_len // self.mesh.tp, dim, dtype=self._hidden_type(), device="meta", requires_grad=True
        )
        tokens = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        return Stage(
            part,
            number,
            self.count,
            self.device,
            input_args=tokens if number == 0 else hidden,
            output_args=loss if number == self.count - 1 else hidden,
            group=self.mesh.dim("pp").get_group(),
        )

    def _hidden_type(self) -> torch.dtype:
        training = self.config.training
        return DTYPES[training.mixed_precision_output or training.mixed_precision_param]


def _padded(piece: Batch, rows: int) -> Batch:
    """``piece`` with rows added that count nothing: a schedule runs a fixed number of micro-batches."""
    short = rows - len(piece.tokens)
    if short == 0:
        return piece
    extra = piece.rows(slice(0, 1))
    labels = torch.full_like(extra.labels, IGNORED).expand(short, -1)

    def longer(have: Tensor | None, one: Tensor | None) -> Tensor | None:
        return None if have is None or one is None else torch.cat((have, one.expand(short, -1)))

    return Batch(
        tokens=torch.cat((piece.tokens, extra.tokens.expand(short, -1))),
        labels=torch.cat((piece.labels, labels)),
        positions=longer(piece.positions, extra.positions),
        documents=longer(piece.documents, extra.documents),
    )
