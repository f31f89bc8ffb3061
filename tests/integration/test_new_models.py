"""Families with dropout, concatenations and clips: every executor trains them alike, and clips go all the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import SGD, Trainer
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.models import alexnet, resnet_imagenet
from crossbow_py.models.airbench import AirbenchNet
from crossbow_py.models.alexnet import OneTower
from crossbow_py.models.densenet import DenseNet
from crossbow_py.models.mobilenet import MobileNetV2
from crossbow_py.models.resnet3d import ResNet3d
from tests.support import assert_learners_equal, features, make_tasks, plan

pytestmark = pytest.mark.slow

CLASSES = 5
SHAPES = {
    "airbench": (3, 17, 17),
    "alexnet": (3, 63, 63),
    "densenet": (3, 32, 32),
    "densenet40": (3, 8, 8),
    "mobilenet": (3, 16, 16),
    "resnet3d": (3, 8, 16, 16),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "airbench": lambda: AirbenchNet((4, 8, 8), 3, CLASSES),
    "alexnet": lambda: OneTower(3, CLASSES, dropout=0.5),
    "densenet": lambda: DenseNet((1, 3, 1, 2), 3, CLASSES),
    "densenet40": lambda: DenseNet((2, 1, 1), 3, CLASSES, small=True),
    "mobilenet": lambda: MobileNetV2(0.25, 3, CLASSES),
    "resnet3d": lambda: ResNet3d((1, 1, 2, 1), 3, CLASSES),
}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few units: float64 is slow, and widths change no operator."""
    monkeypatch.setattr(alexnet, "CLASSIFIER_UNITS", 16)
    monkeypatch.setattr(resnet_imagenet, "STAGE_CHANNELS", (4, 6, 8, 8))


@pytest.mark.parametrize("family", MODELS)
def test_rounds_in_float64_agree_on_every_executor_and_loop_over_no_operator(family: str) -> None:
    banks = {}
    for executor in ("serial", "threads", "fused"):
        torch.manual_seed(4)
        data = features(24, SHAPES[family], CLASSES)
        tasks = make_tasks(MODELS[family], data=data, order="rows" if executor == "threads" else "blocks")
        runner = EXECUTORS[executor](tasks)
        for index in range(4):
            runner.submit(plan(tasks, index, 0.02))
        runner.drain()
        runner.close()
        banks[executor] = tasks.bank
        assert getattr(runner, "looped", []) == []
    assert_learners_equal(banks["threads"], banks["serial"])
    assert_learners_equal(banks["fused"], banks["serial"])


def clips(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Bright and dark ones."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 128, (count, 3, 8, 16, 16), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % 2
    return noise + 127 * labels.view(-1, 1, 1, 1, 1).to(torch.uint8), labels


@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_clips_of_bytes_are_trained_on_and_evaluated(executor: Literal["serial", "threads", "fused"]) -> None:
    trainer = Trainer(
        model=lambda: ResNet3d((1, 1, 1, 1), 3, 2), train_data=clips(0, 64), test_data=clips(1, 16), mean=(0.5,) * 3,
        std=(0.25,) * 3, batch_size=4, num_learners=2, executor=executor, device="cpu", precision="fp32",
        optimizer=SGD(learning_rate=0.01, momentum=0.9),
    )  # fmt: skip
    # How soon hangs on the processor's rounding; statistics of normalisation lag behind the weights.
    assert trainer.fit(max_epochs=20, target_accuracy=1.0).test_accuracy == 1.0
