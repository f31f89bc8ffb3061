"""Networks in training on photographs that are decoded meanwhile, a window of rounds at a time.

The "device" is one processor core: torch has one thread, worker processes have the other cores. A window is taken by
what the training loop says after every round: the time, and what of it was spent waiting for data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import nn

from crossbow_py import SGD, Augmentation, Independent, Trainer
from crossbow_py.core.errors import UserError
from crossbow_py.core.host import foreign_share
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.sources.image_folder import ImageFolder
from crossbow_py.data.streaming.streaming_feed import StreamingFeed
from experiments.bench.rounds import MarkedRounds, trained_window
from experiments.bench.windows import Window, load_with_ended, window_of

SIZE = 64
_SAMPLES_AN_EPOCH = 20_000  # so many that no window meets the end of an epoch


@dataclass(frozen=True)
class Photographs:
    """Training images of a folder, each many times in an epoch; no two crops of one are the same.

    `num_files` is that of the different ones.
    """

    data: ImageFolderData
    num_files: int
    mean: Sequence[float] | None
    std: Sequence[float] | None


@dataclass(frozen=True)
class Setup:
    """Plain values: what is trained, by how many independent models that all take the same batches."""

    width: int
    batch_size: int
    num_models: int = 1
    executor: Literal["serial", "fused"] = "serial"


class StreamedRun:
    """A training run that is held after every window and goes on with the next; its weights and place are kept."""

    def __init__(self, setup: Setup, photographs: Photographs) -> None:
        self.setup = setup
        classes = len(photographs.data.classes)
        self._trainer = Trainer(
            model=lambda: five_layers(setup.width, classes),
            train_data=photographs.data,
            num_classes=classes,
            optimizer=SGD(learning_rate=0.001, momentum=0.9),
            averaging=Independent(),
            augmentation=Augmentation(flip=True),
            mean=photographs.mean,
            std=photographs.std,
            batch_size=setup.batch_size,
            num_learners=setup.num_models,
            executor=setup.executor,
            device="cpu",
            precision="fp32",
            num_workers=0,
        )

    @property
    def sample_bytes(self) -> int:
        return self._feed.sample_bytes

    @property
    def _feed(self) -> StreamingFeed:
        feed = self._trainer.run.train_feed
        assert isinstance(feed, StreamingFeed), "images in folders are streamed"
        return feed

    def rounds_window(self, num_workers: int, warm_up: int, rounds: int) -> Window:
        """`rounds` rounds after `warm_up` others, in which worker processes start."""
        self._feed.use_workers(num_workers)
        return trained_window(self._trainer, self._images, max_rounds=warm_up + rounds, warm_up=warm_up)

    def timed_window(self, num_workers: int, warm_up_s: float, seconds: float) -> Window:
        """The rounds of `seconds`, after those of `warm_up_s`.

        Raises:
            UserError: no whole round falls into it.
        """
        begun_s = self._trainer.state.elapsed_s
        too_short = UserError(f"--seconds must be enough for a round, got {seconds:g}; lengthen it.")
        self._feed.use_workers(num_workers)
        marks, before = MarkedRounds(), load_with_ended()
        try:
            self._trainer.fit(max_time_s=begun_s + warm_up_s + seconds, after_round=marks)
        except UserError as error:  # its time is over before the first round
            raise too_short from error
        first = next((place for place, mark in enumerate(marks) if mark.elapsed_s >= begun_s + warm_up_s), len(marks))
        if first > len(marks) - 2:
            raise too_short
        share = foreign_share(before, load_with_ended())
        return replace(window_of(marks, first, self._images), foreign_share=share)

    @property
    def _images(self) -> int:
        return self.setup.batch_size * self.setup.num_models


def photographs(folder: str) -> Photographs:
    """The training images of a folder, decoded for every crop. Raises UserError without them."""
    source = ImageFolder(folder=folder, size=SIZE, resize=SIZE)
    data = source.read(progress=False)[0]
    assert isinstance(data, ImageFolderData), "an ImageFolder reads nothing else"
    repeated = np.arange(max(_SAMPLES_AN_EPOCH, len(data)), dtype=np.int64) % len(data)
    return Photographs(data.subset(repeated), len(data), *source.moments())


def five_layers(width: int, num_classes: int) -> nn.Module:
    """AlexNet's beginning and end: three convolutions, two linear layers. `[B, 3, 64, 64]` → `[B, num_classes]`."""
    return nn.Sequential(
        nn.Conv2d(3, width, 11, stride=4, padding=2), *_pooled(),
        nn.Conv2d(width, 2 * width, 5, padding=2), *_pooled(),
        nn.Conv2d(2 * width, 3 * width, 3, padding=1), nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(3 * width * 3**2, 4 * width), nn.ReLU(inplace=True),
        nn.Linear(4 * width, num_classes),
    )  # fmt: skip


def _pooled() -> list[nn.Module]:
    return [nn.MaxPool2d(3, stride=2), nn.ReLU(inplace=True)]
