"""Whole runs for tests: a trainer on tiny real data, models with everything a resume must carry, and a listener."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py import SGD, Augmentation, Listener, Trainer
from crossbow_py.schedules import MultiStep
from crossbow_py.telemetry.records import read_metrics
from tests.support import linear_model

# Of a line of metrics.jsonl, what does not depend on the clock.
MEASURED = (
    "epoch", "samples_seen", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "learning_rate", "spread",
)  # fmt: skip


def blobs(num_samples: int) -> tuple[Tensor, Tensor]:
    """Four features around one corner for each of three classes, well apart: a linear model gets every sample right."""
    generator = torch.Generator().manual_seed(4)
    targets = torch.arange(num_samples) % 3
    inputs = 4.0 * nn.functional.one_hot(targets, 4) + 0.1 * torch.randn(num_samples, 4, generator=generator)
    return inputs, targets


def images(num_samples: int, num_classes: int = 3) -> tuple[Tensor, Tensor]:
    """uint8 images [N, 3, 8, 8], brighter with the class."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.arange(num_samples) % num_classes
    noise = torch.randint(0, 100, (num_samples, 3, 8, 8), generator=generator)
    return (noise + 50 * targets.view(-1, 1, 1, 1)).to(torch.uint8), targets


def image_model() -> nn.Module:
    """BatchNorm and dropout, for images [3, 8, 8] and three classes."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32, 3),
    )


def deeper_image_model() -> nn.Module:
    """As `image_model`, with matrices between the first and the last layer."""
    first, *rest = image_model()
    return nn.Sequential(first, nn.Conv2d(8, 8, 3, padding=1, bias=False), *rest[:-1], nn.Linear(32, 32), rest[-1])


def make_trainer(**options: Any) -> Trainer:
    """Two serial learners of a linear model on 40 samples, batches of 4: an epoch is 5 rounds."""
    defaults: dict[str, Any] = {
        "model": linear_model,
        "train_data": blobs(40),
        "batch_size": 4,
        "num_learners": 2,
        "executor": "serial",
        "device": "cpu",
        "precision": "fp32",
        "optimizer": SGD(),
    }
    return Trainer(**{**defaults, **options})


def change_run(trainer: Trainer, **components: Any) -> None:
    """Give a trainer's run other components."""
    trainer.run = dataclasses.replace(trainer.run, **components)


def image_trainer(**options: Any) -> Trainer:
    """BatchNorm, dropout, augmentation, momentum, weight decay and a rate that drops: all that a resume must carry."""
    defaults: dict[str, Any] = {
        "model": image_model,
        "train_data": images(50),
        "test_data": images(20),
        "augmentation": Augmentation(crop_padding=2, flip=True),
        "optimizer": SGD(learning_rate=0.05, momentum=0.9, weight_decay=1e-2),
        "schedule": MultiStep(milestones=(2.0, 4.0), gamma=0.5),
    }
    return make_trainer(**{**defaults, **options})


def weights(folder: Path, name: str = "model.safetensors") -> bytes:
    """The model that a run has left."""
    return (folder / name).read_bytes()


def measured(folder: Path) -> list[tuple[Any, ...]]:
    """A run's metrics, line by line, for comparison with another's."""
    return [tuple(line[name] for name in MEASURED) for line in read_metrics(folder / "metrics.jsonl")]


def equal_states(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules agree in every bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class Recorder(Listener):
    """Keeps every call as (hook, what it was given)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def of(self, hook: str) -> list[Any]:
        """What one hook was given, in order."""
        return [given for name, given in self.calls if name == hook]

    def on_start(self, info: Any) -> None:
        self.calls.append(("start", info))

    def on_progress(self, progress: Any) -> None:
        self.calls.append(("progress", progress))

    def on_epoch(self, record: Any) -> None:
        self.calls.append(("epoch", record))

    def on_message(self, message: str) -> None:
        self.calls.append(("message", message))

    def on_checkpoint(self, path: str, samples_seen: int) -> None:
        self.calls.append(("checkpoint", (path, samples_seen)))

    def on_end(self, summary: Any) -> None:
        self.calls.append(("end", summary))

    def close(self) -> None:
        self.calls.append(("close", None))
