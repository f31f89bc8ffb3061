"""Rounds of an executor on made-up images, built by `Trainer` as a user's are: to be counted, traced or weighed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from crossbow_py import SGD, Trainer
from crossbow_py.core.host import foreign_share
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import Executor
from crossbow_py.engine.modules.precision import PrecisionName
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks
from crossbow_py.models import MODELS
from crossbow_py.telemetry.events import RoundEnd
from crossbow_py.train.loop.learners import new_executor
from crossbow_py.train.loop.planning import plan_round
from experiments.bench.windows import Mark, Window, load_with_ended, window_of

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


def trainer_on_noise(model: str, num_images: int, **settings: Any) -> Trainer:
    """Make a trainer of a model of the zoo on made-up images, alike in every process; `settings` are the trainer's."""
    shape, classes = input_shape(model), num_classes(model)
    images = torch.randint(
        0, 256, (num_images, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )  # fmt: skip
    return Trainer(
        model=lambda: build_model(model),
        train_data=(images, torch.arange(num_images) % classes),
        num_classes=classes,
        augmentation=Augmentation(crop_padding=4, flip=True) if shape[0] == 3 else Augmentation(),
        mean=(0.5,) * shape[0],
        std=(0.25,) * shape[0],
        **{"optimizer": SGD(learning_rate=0.001, momentum=0.9, weight_decay=1e-4), **settings},
    )


class MarkedRounds(list[Mark]):
    """Notes every round of a `fit`, when given to it as `after_round`."""

    def __call__(self, end: RoundEnd) -> None:
        self.append(Mark(end.elapsed_s, end.waited_s))


def trained_window(
    trainer: Trainer, images_a_round: int, *, max_rounds: int | None = None, seconds: float | None = None,
    warm_up: int = 1,
) -> Window:  # fmt: skip
    """Train for so many rounds or seconds more; the window begins after the `warm_up`, in which `fit` starts threads.

    Where `seconds` are hardly enough, two more rounds are trained.
    """
    marks, before = MarkedRounds(), load_with_ended()
    until_s = None if seconds is None else trainer.state.elapsed_s + seconds
    trainer.fit(max_rounds=max_rounds, max_time_s=until_s, after_round=marks)
    while len(marks) < warm_up + 2:
        trainer.fit(max_rounds=2, after_round=marks)
    window = window_of(marks, warm_up - 1, images_a_round)
    return replace(window, foreign_share=foreign_share(before, load_with_ended()))


class Rounds:
    """An executor that runs one round after another. Use as a context manager: leaving it closes the executor.

    Attributes:
        built: the run that the trainer made; the bank among it.
    """

    def __init__(self, setup: Setup, num_images: int = _NUM_IMAGES, **settings: Any) -> None:
        own = {key: value for key, value in vars(setup).items() if key != "model"}
        trainer = trainer_on_noise(setup.model, max(num_images, setup.batch_size), **own, **settings)
        self.built = trainer.run
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

    @property
    def executor(self) -> Executor:
        """The executor, which is made when it is first asked for."""
        if self._executor is None:
            self._executor = new_executor(self.built)
        return self._executor

    def submit(self) -> None:
        """Run another round, which may be in flight when this returns."""
        self.executor.submit(plan_round(self.built, self._index, self._index * self._num_images, 1.0))
        self._index += 1

    def drain(self) -> None:
        """Wait until the device is past all rounds."""
        self.executor.drain()

    def run(self, num_rounds: int) -> None:
        """Run that many rounds more; when it returns, the device is past them."""
        for _ in range(num_rounds):
            self.submit()
        self.drain()

    def learn(self) -> None:
        """The learning task of one learner alone: forward, loss, backward, its gradients to the bank."""
        run = self.built
        tasks = RoundTasks(
            run.bank, update=run.update, feed=run.train_feed, loss=run.loss, seed=0, collective=run.collective
        )
        tasks.learn(0, RoundOutcome(plan_round(run, 0, 0, 1.0)))
