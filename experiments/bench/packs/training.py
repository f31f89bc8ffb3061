"""Packs in training, as a user would train an ensemble: `averaging=independent` on one feed. And one captured model."""

from __future__ import annotations

import torch

from crossbow_py import SGD, Independent, Trainer
from experiments.bench.gate import Gate, Paced, Ready
from experiments.bench.machine import usable_cores
from experiments.bench.packs.side import ONE_THREAD, PackSide, PackWorkload
from experiments.bench.sides.captured import captured, model_step, train_for_ever
from experiments.bench.workloads import MOMENTUM, WEIGHT_DECAY

ENDLESS_EPOCHS = 1e6
_LEARNING_RATE = 0.001  # low, so that nothing diverges with batches of one image


def new_pack(side: PackSide, workload: PackWorkload) -> Trainer:
    """A trainer of the side's models, each with weights of its own, that all take the same batches."""
    return Trainer(
        model=workload.make_model,
        train_data=workload.tensors(),
        num_classes=workload.num_classes,
        optimizer=SGD(learning_rate=_LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
        averaging=Independent(),
        augmentation=workload.augmentation,
        mean=workload.mean,
        std=workload.std,
        batch_size=workload.batch_size,
        num_learners=side.num_learners,
        executor=side.executor,
        device="cuda" if workload.device == "cuda" else "cpu",
        precision=side.precision,
    )


def train_pack(side: PackSide, workload: PackWorkload, gate: Gate) -> None:
    # `fused_threads` has as many groups as there are threads, and gives each one of them.
    torch.set_num_threads(1 if side.side == "threads" else usable_cores())
    pack = new_pack(side, workload)
    gate.ready(Ready(1 if side.side in ONE_THREAD else torch.get_num_threads()))
    pack.fit(max_epochs=ENDLESS_EPOCHS, after_round=Paced(gate))


def train_captured(side: PackSide, workload: PackWorkload, gate: Gate) -> None:
    """One model for ever, each step one CUDA graph. Raises RuntimeError when it cannot be captured."""
    step = captured(model_step(side.precision, workload), workload.device)
    detail = "one CUDA graph a step" if workload.device == "cuda" else "no CUDA graph"
    gate.ready(Ready(torch.get_num_threads(), detail))
    train_for_ever(step, workload.batch_size, gate)
