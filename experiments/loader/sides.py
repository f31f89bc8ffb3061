"""The ways to make an epoch of training crops that are compared: from the number of an epoch to the seconds it took."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from PIL import Image

from crossbow_py.data.images.crops import random_resized_box
from crossbow_py.data.images.decoding import encoded_size
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.loader import Loader, fetched_or_raise
from crossbow_py.data.streamed import Key
from experiments.common.machine import usable_core_ids

BATCH = 32
SEED = 0
PILLOW, DECODED, SHRUNK, CACHED = "Pillow", "decoded", "decoded, shrunk", "cached"

Epoch = Callable[[int], float]


@dataclass
class Side:
    """A way, with images/s a core of every repetition, None where no window was clean.

    Attributes:
        watches_load: others' load can be told from its own.
    """

    name: str
    run: Epoch
    images: int
    cores: int = 1
    watches_load: bool = True
    windows: list[float | None] = field(default_factory=list)
    dropped: int = 0

    def kept(self) -> list[float]:
        """Of the clean windows."""
        return [window for window in self.windows if window is not None]


def pillow_side(data: ImageFolderData) -> Side:
    """Plain Pillow: open, convert, resize a box. Boxes are drawn before the clock starts; nothing goes to a batch."""
    sizes = [encoded_size(data.name_of(sample)) or (1, 1) for sample in range(len(data))]

    def run(epoch: int) -> float:
        boxes = [random_resized_box(SEED, epoch, s, *size, data.min_area) for s, size in enumerate(sizes)]
        begun = time.perf_counter()
        for sample, box in enumerate(boxes):
            with Image.open(data.name_of(sample)) as opened:
                image = opened.convert("RGB")
            image.resize(
                (data.size, data.size),
                Image.Resampling.BILINEAR,
                box=(box.left, box.top, box.left + box.width, box.top + box.height),
            )
        return time.perf_counter() - begun

    return Side(PILLOW, run, len(data))


def fetch_side(name: str, data: ImageFolderData) -> Side:
    """Batches of training crops by `fetch`, in this process."""

    def run(epoch: int) -> float:
        begun = time.perf_counter()
        for keys in batches_of(epoch, len(data)):
            data.fetch(keys, seed=SEED, training=True, on_sample=_tell_nobody)
        return time.perf_counter() - begun

    return Side(name, run, len(data))


def worker_side(name: str, data: ImageFolderData, epochs: int) -> Side:
    """The same by a worker process a core, as a streaming feed gets them: `epochs` epochs, once all workers are at it.

    What was made before the clock started is not counted: it starts when nothing made ahead is left.
    """
    cores = usable_core_ids()
    num_batches = epochs * sum(1 for _ in batches_of(0, len(data)))
    ahead = 4 * len(cores)  # more than workers hold ready

    def run(epoch: int) -> float:
        endless = (keys for number in itertools.count(epoch) for keys in batches_of(number, len(data)))
        with on_cores(cores):
            loader = Loader(
                data, itertools.islice(endless, ahead + num_batches + ahead), seed=SEED, training=True,
                num_workers=len(cores), pins=False,
            )  # fmt: skip
            try:
                for _ in range(ahead):
                    fetched_or_raise(next(loader))
                begun = time.perf_counter()
                for _ in range(num_batches):
                    fetched_or_raise(next(loader))
                return time.perf_counter() - begun
            finally:
                loader.close()

    return Side(name, run, epochs * len(data), cores=len(cores), watches_load=False)


def batches_of(epoch: int, count: int) -> Iterator[list[Key]]:
    """Keys of an epoch in the order of samples."""
    for first in range(0, count, BATCH):
        yield [Key(epoch, sample) for sample in range(first, min(count, first + BATCH))]


@contextmanager
def on_cores(cores: Sequence[int] | set[int]) -> Iterator[None]:
    """Run this process, and those it starts meanwhile, on these cores."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _tell_nobody(sample: int) -> None:
    """Nobody watches this process."""
