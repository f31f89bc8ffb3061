"""The run behind the golden checkpoints; `python -m tests.golden.make` writes those of the present format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crossbow_py import SGD, CheckpointSettings, MultiStep, Trainer
from crossbow_py.checkpoint import FORMAT_VERSION

GOLDEN = Path(__file__).parent
ROUNDS_BEFORE, ROUNDS_AFTER = 10, 10


def model() -> nn.Module:
    """4 features, 3 classes; the checkpoint says what the weights are."""
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def trainer(**options: Any) -> Trainer:
    """Serial and in float32; 48 samples, so that the checkpoint stands inside an epoch."""
    values = torch.arange(48 * 4, dtype=torch.float64).reshape(48, 4)
    return Trainer(
        model=model,
        train_data=(torch.sin(values).float(), torch.arange(48) % 3),
        batch_size=4,
        num_learners=2,
        optimizer=SGD(learning_rate=0.05, momentum=0.9, weight_decay=1e-3),
        schedule=MultiStep(milestones=(2.0,), gamma=0.5),
        executor="serial",
        device="cpu",
        precision="fp32",
        **options,
    )


def main() -> None:
    """Refuses to replace a format that is already there."""
    folder = GOLDEN / f"format_{FORMAT_VERSION}"
    folder.mkdir()
    trainer(output_dir=folder, checkpoint=CheckpointSettings(every_epochs=None)).fit(max_rounds=ROUNDS_BEFORE)
    kept = {"checkpoints", "model.safetensors"}
    trainer(output_dir=folder / "after", resume=folder).fit(max_rounds=ROUNDS_AFTER)
    (folder / "after" / "model.safetensors").replace(folder / "model.safetensors")
    for path in folder.iterdir():
        if path.is_dir() and path.name not in kept:
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()


if __name__ == "__main__":
    main()
