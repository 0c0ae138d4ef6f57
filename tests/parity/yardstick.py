"""A run that can tell: the model, the text and the comparison that every layout is held to.

Near its initial weights a small model on random tokens hides a skipped layer, wrong positions and doubled gradients. Here
the blocks start strong (``init_std`` 0.15), the text can be learnt from position and context, clipping is active in
every step, and the gradient norm is compared beside the loss: AdamW hides a wrong gradient scale from the loss.
``test_mutants.py`` holds that each of the usual mistakes stands out by ten times the tolerance.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LOSS = 1e-5
"""Largest relative difference of the loss that counts as equal, fp32."""

NORM = 1e-4
"""The same of the gradient norm, and of the final weights."""

STEPS, FULL_STEPS = 6, 20


@dataclass
class Curve:
    """What a run showed: loss and gradient norm of every step, validation loss, and the weights of the parts here."""

    loss: list[float]
    norm: list[float]
    validation: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def write_text(folder: Path) -> str:
    """Documents of letters that each go on by a step of their own: what follows depends on where one began."""
    rng = np.random.default_rng(7)
    path = folder / "documents.jsonl"
    with path.open("w") as file:
        for _ in range(600):
            start, step, length = rng.integers(0, 40), rng.integers(1, 5), rng.integers(20, 90)
            text = bytes(48 + (start + step * np.arange(length)) % 64).decode("latin-1")
            print(json.dumps({"text": text}), file=file)
    return str(path)


def settings(text: str, folder: str, steps: int = STEPS, **tables: dict[str, Any]) -> dict[str, Any]:
    """The yardstick's config as TOML tables; ``tables`` override keys."""
    base: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": folder},
        "model": {
            "dim": 64,
            "n_layers": 4,
            "n_heads": 8,
            "n_kv_heads": 4,
            "head_dim": 8,
            "ffn_dim": 192,
            "vocab_size": 320,
            "init_std": 0.15,
        },
        "training": {
            "dataset": "jsonl",
            "dataset_path": text,
            "seq_len": 32,
            "global_batch_size": 8,
            "local_batch_size": 8,
            "steps": steps,
            "max_norm": 1.0,
            "mixed_precision_param": "float32",
        },
        "optimizer": {"lr": 3e-3, "eps": 1e-6},
        "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0},
        "activation_checkpoint": {"mode": "none"},
        "data": {"prefetch": 0},
    }
    for name, values in tables.items():
        base[name] = base.get(name, {}) | values
    return base


def run(values: dict[str, Any], mutate: Callable[[Any], None] | None = None, weights: bool = False) -> Curve:
    """Train as ``values`` say in this rank of the world that the environment describes."""
    from titanlite.config import from_dict
    from titanlite.distributed.world import World
    from titanlite.train import Trainer

    class Recorded(Trainer):
        """A trainer that remembers instead of logging."""

        curve = Curve([], [])

        def record(self, verdict: Any, validated: dict[str, float]) -> None:
            self.stopping, self.data_ended = verdict.stop, verdict.data_ended
            self.curve.loss.append(verdict.loss)
            self.curve.norm.append(verdict.grad_norm)

    config = from_dict(values, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    world = World.start(config.comm)
    try:
        trainer = Recorded(config, world)
        trainer.curve = Curve([], [])
        if mutate is not None:
            mutate(trainer)
        try:
            trainer.run()
            if weights:
                trainer.curve.weights = gathered(trainer)
            return trainer.curve
        finally:
            trainer.close()
    finally:
        world.close()


def gathered(trainer: Any) -> dict[str, np.ndarray]:
    """This pipeline rank's weights, whole, on the first of the ranks that share them."""
    from torch.distributed.tensor import DTensor

    found = {}
    for part in trainer.parts:
        for name, tensor in part.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if trainer.mesh.is_first_of("dp_replicate", "dp_shard", "cp", "tp"):
                found[name] = whole.float().cpu().numpy()
    return found


def together(curves: list[Curve]) -> Curve:
    """What all ranks saw, which must be the same, with the weights that each has."""
    first = curves[0]
    for other in curves[1:]:
        assert (other.loss, other.norm, other.validation) == (first.loss, first.norm, first.validation)
    return Curve(first.loss, first.norm, first.validation, {k: v for curve in curves for k, v in curve.weights.items()})


def difference(one: list[float], other: list[float]) -> float:
    """Largest relative difference."""
    assert len(one) == len(other) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def weight_difference(one: Curve, other: Curve) -> float:
    """Largest relative distance of a weight, as the norm of the difference over the norm."""
    assert one.weights.keys() == other.weights.keys()
    return max(
        float(np.linalg.norm(one.weights[name] - value) / np.linalg.norm(value))
        for name, value in other.weights.items()
    )
