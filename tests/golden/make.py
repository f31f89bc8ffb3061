"""The run behind the golden checkpoints; `python -m tests.golden.make` writes those of the present format."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crossbow_py import SGD, CheckpointSettings, Trainer
from crossbow_py.averaging import Crossbow
from crossbow_py.distributed.ranks import ALONE, Ranks
from crossbow_py.schedules import MultiStep
from crossbow_py.train.checkpoints.checkpoint import FORMAT_VERSION
from tests.ranks import on_ranks

GOLDEN = Path(__file__).parent
ROUNDS_BEFORE, ROUNDS_AFTER = 10, 10
NUM_RANKS, NUM_LEARNERS = 2, 2  # learners of all ranks
AS_THEY_HAD_IT = Crossbow(correction_rate=None, batch_norm="mean", recalibration_batches=32)


def model() -> nn.Module:
    """4 features, 3 classes; the checkpoint says what the weights are."""
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def trainer(ranks: Ranks = ALONE, **options: Any) -> Trainer:
    """Serial and in float32; 48 samples, so that the checkpoint stands inside an epoch."""
    values = torch.arange(48 * 4, dtype=torch.float64).reshape(48, 4)
    settings: dict[str, Any] = {"averaging": AS_THEY_HAD_IT, **options}
    return Trainer(
        model=model,
        train_data=(torch.sin(values).float(), torch.arange(48) % 3),
        batch_size=4,
        num_learners=NUM_LEARNERS // ranks.num_ranks,
        optimizer=SGD(learning_rate=0.05, momentum=0.9, weight_decay=1e-3),
        schedule=MultiStep(milestones=(2.0,), gamma=0.5),
        executor="serial",
        device="cpu",
        precision="fp32",
        ranks=ranks,
        **settings,
    )


def train(ranks: Ranks, folder: Path, num_rounds: int) -> None:
    """Write a checkpoint and the model at the end of so many rounds, and at no other time."""
    trainer(ranks, output_dir=folder, checkpoint=CheckpointSettings(every_epochs=None)).fit(max_rounds=num_rounds)


def train_on(ranks: Ranks, folder: Path, output_dir: Path) -> tuple[int, int, int]:
    """Resume it; writes the model. Returns the rounds, samples and epochs that it stood at."""
    resumed = trainer(ranks, resume=folder, output_dir=output_dir)
    found = resumed.state.round_index, resumed.state.samples_seen, resumed.state.closed_epochs
    resumed.fit(max_rounds=ROUNDS_AFTER)
    return found


def main() -> None:
    """Refuses to replace a format that is already there. The model is that of a run which nothing interrupts."""
    folder = GOLDEN / f"format_{FORMAT_VERSION}"
    folder.mkdir()
    with tempfile.TemporaryDirectory() as scratch:
        before, whole = Path(scratch) / "before", Path(scratch) / "whole"
        on_ranks(train, NUM_RANKS, before, ROUNDS_BEFORE)
        on_ranks(train, NUM_RANKS, whole, ROUNDS_BEFORE + ROUNDS_AFTER)
        shutil.copytree(before / "checkpoints", folder / "checkpoints")
        shutil.copy(whole / "model.safetensors", folder)


if __name__ == "__main__":
    main()
