"""Training on mixed batches: as a plain loop with the same draws, on every executor, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossbow_py import SGD, Augmentation, Trainer
from crossbow_py.averaging import SynchronousSGD
from crossbow_py.core.errors import BadDataError, UserError
from crossbow_py.data.build import make_feed
from crossbow_py.data.mixing import Mixing
from crossbow_py.telemetry.records import read_metrics
from tests.trainers import blobs, image_trainer, images, make_trainer, weights

EXECUTORS = ["serial", "threads", "fused", "fused_threads"]
BATCH, ROUNDS, SEED = 5, 6, 3


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(24, 3))


def trained(executor: str, augmentation: Augmentation, **options: Any) -> dict[str, Tensor]:
    trainer = Trainer(
        model=model, train_data=images(40), batch_size=BATCH, num_learners=2, averaging=SynchronousSGD(), seed=SEED,
        optimizer=SGD(learning_rate=0.2, momentum=0.9), executor=executor, device="cpu", precision="fp32",
        augmentation=augmentation, **options,
    )  # fmt: skip
    return dict(trainer.fit(max_rounds=ROUNDS).model.named_parameters())


def plain(augmentation: Augmentation, smoothing: float = 0.0, accumulate: int = 1) -> dict[str, Tensor]:
    """A loop of plain PyTorch: two batches a step, mixed as torchvision mixes, with the draws of their positions."""
    torch.manual_seed(SEED)
    own, size = model(), BATCH * accumulate
    optimizer = torch.optim.SGD(own.parameters(), lr=0.2, momentum=0.9)
    draws = Mixing(augmentation.mixup, augmentation.cutmix, SEED, 3)
    feed = make_feed(images(40), size, SEED)
    for step in range(ROUNDS):
        optimizer.zero_grad()
        for start in (2 * step * size, (2 * step + 1) * size):
            inputs, targets = feed.batch(start)
            share, box = draws.draw(start, (8, 8))
            other, hot = inputs.roll(1, 0), F.one_hot(targets, 3).float()
            if box is None:
                inputs = inputs * share + other * (1 - share)
            else:
                top, bottom, left, right = box
                inputs[..., top:bottom, left:right] = other[..., top:bottom, left:right]
            soft = hot * share + hot.roll(1, 0) * (1 - share)
            (F.cross_entropy(own(inputs), soft, label_smoothing=smoothing) / 2).backward()
        optimizer.step()
    return dict(own.named_parameters())


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, own in found.items():
        torch.testing.assert_close(own, expected[name].detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("augmentation", [Augmentation(mixup=0.4), Augmentation(mixup=0.4, cutmix=1.0)])
def test_mixed_batches_train_as_in_a_plain_loop(executor: str, augmentation: Augmentation) -> None:
    assert_alike(trained(executor, augmentation), plain(augmentation))


@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_labels_of_mixed_batches_are_smoothed_as_torch_does(executor: str) -> None:
    augmentation = Augmentation(cutmix=1.0)
    assert_alike(trained(executor, augmentation, label_smoothing=0.2), plain(augmentation, smoothing=0.2))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("executor", ["serial", "fused"])
def test_mixed_batches_in_micro_batches_are_whole_batches(executor: str, smoothing: float) -> None:
    augmentation = Augmentation(mixup=0.4)
    found = trained(executor, augmentation, accumulate=2, label_smoothing=smoothing)
    assert_alike(found, plain(augmentation, smoothing, accumulate=2))


def test_run_resumed_in_mid_epoch_mixes_as_the_uninterrupted_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"augmentation": Augmentation(2, True, mixup=0.4, cutmix=1.0)}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    image_trainer(output_dir=whole, **options).fit(max_epochs=2)
    image_trainer(output_dir=parts, **options).fit(max_samples=64)
    image_trainer(output_dir=parts, resume=parts, **options).fit(max_epochs=2)
    assert weights(parts) == weights(whole)
    (first, _) = read_metrics(whole / "metrics.jsonl")
    assert first["train_accuracy"] is None and first["test_accuracy"] is not None
    with pytest.raises(UserError, match=r"data\.augmentation\.mixup: 0\.4 → 0\.0"):
        image_trainer(output_dir=parts, resume=parts, augmentation=Augmentation(2, True, cutmix=1.0))


class Unlabelled:
    """Samples, the last of which has no class."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(4), -100 if index == 11 else index % 3


LEFT_OUT = torch.arange(40) % 3
LEFT_OUT[7] = -100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": nn.MultiMarginLoss()}, r"mixup=0\.2 is for cross-entropy without weights, got another loss; leave"),
        ({"class_weights": [1.0, 2.0, 1.0]}, "got class_weights; leave that out"),
        ({"train_data": (blobs(40)[0], LEFT_OUT)}, "sample 7 of the training .* class -100, .* leaves no target out"),
        ({"train_data": (blobs(40)[0], blobs(40)[0][:, :3]), "loss": nn.MSELoss()}, "is for one class a sample"),
        ({"batch_size": 1}, "got batch_size=1; set batch_size=2"),
    ],
)
def test_runs_that_cannot_train_on_mixed_batches_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_trainer(**{"augmentation": Augmentation(mixup=0.2), "num_classes": None, **options})


def test_streamed_samples_without_a_class_are_refused_when_they_come() -> None:
    trainer = make_trainer(train_data=Unlabelled(), augmentation=Augmentation(mixup=0.2), num_workers=0)
    with pytest.raises(BadDataError, match="item 11 of the data set has the class -100"):
        trainer.fit(max_epochs=1)
