"""The ways to make training crops that are compared: from the number of an epoch to the processor time it took.

Processor time, not time on a clock: a core that another program had for a while is not laid to the side that waited.
Nothing here waits for anything else, as files are in the page cache.
"""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from PIL import Image

from crossbow_py.core.host import usable_core_ids
from crossbow_py.data.images.crops import random_resized_box
from crossbow_py.data.images.decoding import encoded_size
from crossbow_py.data.images.image_data import ImageFolderData
from crossbow_py.data.streaming.loader import Loader, fetched_or_raise
from crossbow_py.data.streaming.streamed_data import Key

BATCH = 32
SEED = 0
PILLOW, DECODED, SHRUNK, CACHED = "Pillow", "decoded", "decoded, shrunk", "cached"


@dataclass
class Side:
    """A way, the images it makes in a repetition, and images a second of processor time of every repetition."""

    name: str
    run: Callable[[int], float]
    images: int
    rates: list[float] = field(default_factory=list)

    def repeat(self, epoch: int) -> None:
        self.rates.append(self.images / self.run(epoch))


def pillow_side(data: ImageFolderData, epochs: int) -> Side:
    """Plain Pillow: open, convert, resize a box. Boxes are drawn before the clock starts; nothing goes to a batch."""
    sizes = [encoded_size(data.name_of(sample)) or (1, 1) for sample in range(len(data))]

    def run(epoch: int) -> float:
        boxes = [
            (sample, random_resized_box(SEED, epoch * epochs + number, sample, *size, data.min_area))
            for number in range(epochs)
            for sample, size in enumerate(sizes)
        ]
        begun = time.thread_time()
        for sample, box in boxes:
            with Image.open(data.name_of(sample)) as opened:
                image = opened.convert("RGB")
            image.resize(
                (data.size, data.size),
                Image.Resampling.BILINEAR,
                box=(box.left, box.top, box.left + box.width, box.top + box.height),
            )
        return time.thread_time() - begun

    return Side(PILLOW, run, epochs * len(data))


def fetch_side(name: str, data: ImageFolderData, epochs: int) -> Side:
    """Batches of training crops by `fetch`, in this process."""

    def run(epoch: int) -> float:
        begun = time.thread_time()
        for keys in batches_of(epoch, epochs, len(data)):
            data.fetch(keys, seed=SEED, training=True, on_sample=_tell_nobody)
        return time.thread_time() - begun

    return Side(name, run, epochs * len(data))


def worker_side(name: str, data: ImageFolderData, epochs: int) -> Side:
    """The same by a worker process a core, as a streaming feed gets them: all that the processes take from their start.

    So what it takes to start them is in it, and to hand batches over, on both sides.
    """
    cores = usable_core_ids()

    def run(epoch: int) -> float:
        with on_cores(cores):
            begun = _own_and_ended_s()
            loader = Loader(
                data, batches_of(epoch, epochs, len(data)), batch_size=BATCH, seed=SEED, training=True,
                num_workers=len(cores), pins=False,
            )  # fmt: skip
            for loaded in loader:
                fetched_or_raise(loaded)
            loader.close()
            return _own_and_ended_s() - begun

    return Side(name, run, epochs * len(data))


def batches_of(epoch: int, epochs: int, count: int) -> Iterator[list[Key]]:
    """Keys of the `epochs` epochs of repetition `epoch`, in the order of samples."""
    for number, first in itertools.product(range(epoch * epochs, (epoch + 1) * epochs), range(0, count, BATCH)):
        yield [Key(number, sample) for sample in range(first, min(count, first + BATCH))]


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


def _own_and_ended_s() -> float:
    """Processor time so far: of this process, and of those it started that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _tell_nobody(_: int) -> None:
    """Nobody watches this process."""
