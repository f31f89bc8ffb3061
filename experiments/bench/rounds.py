"""Rounds of an executor on made-up images, built by `Trainer` as a user's are: to be counted, traced or weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from crossbow_py import SGD, Trainer
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import Executor
from crossbow_py.engine.modules.precision import PrecisionName
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks
from crossbow_py.models import MODELS

ExecutorName = Literal["serial", "threads", "streams", "fused"]

_MNIST = ("mlp", "lenet")
_LARGE = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")  # for ImageNet's images and classes
_NUM_IMAGES = 256


@dataclass(frozen=True)
class Setup:
    """Plain values: what runs, and where."""

    model: str
    batch_size: int
    num_learners: int
    executor: ExecutorName
    device: Literal["cpu", "cuda"]
    precision: PrecisionName


def input_shape(model: str) -> tuple[int, int, int]:
    """Channels, height and width of the images a model of the zoo is measured on."""
    if model in _LARGE:
        return 3, 224, 224
    return (1, 28, 28) if model in _MNIST else (3, 32, 32)


def num_classes(model: str) -> int:
    """The number of classes of the data set that these images stand for."""
    return 1000 if model in _LARGE else 10


def build_model(model: str) -> nn.Module:
    return MODELS[model]().build(input_shape(model), num_classes(model))


class Rounds:
    """An executor that runs one round after another. Use as a context manager: leaving it closes the executor.

    Attributes:
        built: the run that the trainer made; the bank among it.
    """

    def __init__(self, setup: Setup) -> None:
        shape = input_shape(setup.model)
        images = torch.zeros((max(_NUM_IMAGES, setup.batch_size), *shape), dtype=torch.uint8)
        targets = torch.arange(len(images)) % num_classes(setup.model)
        channels = shape[0]
        trainer = Trainer(
            model=lambda: build_model(setup.model),
            train_data=(images, targets),
            num_classes=num_classes(setup.model),
            optimizer=SGD(learning_rate=0.01, momentum=0.9, weight_decay=1e-4),
            augmentation=Augmentation(crop_padding=4, flip=True) if channels == 3 else Augmentation(),
            mean=(0.5,) * channels,
            std=(0.25,) * channels,
            batch_size=setup.batch_size,
            num_learners=setup.num_learners,
            executor=setup.executor,
            device=setup.device,
            precision=setup.precision,
        )
        self.built = trainer.run
        self._seed = 0
        self._num_images = setup.num_learners * setup.batch_size
        self._executor: Executor | None = None
        self._index = 0

    @property
    def bank(self) -> ReplicaBank:
        return self.built.bank

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *error: object) -> None:
        if self._executor is not None:
            self._executor.close()

    def run(self, num_rounds: int) -> None:
        """Run that many rounds more; when it returns, the device is past them. The first call makes the executor."""
        if self._executor is None:
            self._executor = self.built.new_executor()
        for _ in range(num_rounds):
            self._executor.submit(self.built.plan(self._index, self._index * self._num_images, 1.0))
            self._index += 1
        self._executor.drain()

    def learn(self) -> None:
        """The learning task of one learner alone: forward, loss, backward, its gradients to the bank."""
        run = self.built
        tasks = RoundTasks(
            run.bank,
            update=run.update,
            feed=run.train_feed,
            loss=run.loss,
            seed=self._seed,
            collective=run.collective,
        )
        tasks.learn(0, RoundOutcome(run.plan(0, 0, 1.0)))
