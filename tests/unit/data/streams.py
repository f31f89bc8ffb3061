"""Streams of batches: a streamed data set, where ranks take batches, whether two are the same, and nothing left."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence

import torch

from crossbow_py.data.feed import Batch, Feed
from crossbow_py.data.streaming.streamed_data import BadSample, Key, Loaded, OnSample, StreamedData

N = 23


class Images(StreamedData):
    """Image i is filled with i and the epoch, but for its left column, which holds 100 and the epoch."""

    image_shape = (3, 2, 4)

    def __init__(self, bad: Sequence[int] = (), max_bad: int = 0, slow: dict[int, float] | None = None) -> None:
        self.bad, self.max_bad, self.slow = set(bad), max_bad, slow or {}
        self.remedy = "remove it"

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.full((3, 2, 4), index, dtype=torch.uint8)
        image[..., 0] = 100
        return image, index

    def fetch(
        self, keys: Sequence[Key], *, seed: int, training: bool, on_sample: OnSample, out: torch.Tensor | None = None
    ) -> Loaded:
        images, targets, bad = [], [], []
        for key in keys:
            on_sample(key.sample)
            time.sleep(self.slow.get(key.sample, 0))
            sample = key.sample
            if sample in self.bad:
                bad.append(BadSample(sample, self.name_of(sample), "torn"))
                if not training:
                    continue
                sample = (sample + 1) % N
            image, target = self[sample]
            images.append(image + (key.epoch if training else 0))
            targets.append(target)
        inputs = torch.stack(images) if images else torch.empty(0, 3, 2, 4, dtype=torch.uint8)
        if out is not None:
            inputs = out[: len(images)].copy_(inputs)
        return Loaded(inputs, torch.tensor(targets), tuple(bad))

    def name_of(self, sample: int) -> str:
        return f"image {sample}"


def counted_out(rank: int, num_ranks: int, num_own: int, batch_size: int, cursor: int, rounds: int) -> list[list[int]]:
    """A rank's positions in each round: all learners of all ranks take one batch after the other."""
    stream, mine = itertools.count(cursor, batch_size), []
    for _ in range(rounds):
        takers = [(r, next(stream)) for r in range(num_ranks) for _ in range(num_own)]
        mine.append([start for r, start in takers if r == rank])
    return mine


def until(condition: Callable[[], bool]) -> bool:
    """Wait for it, at most 20 seconds; whether it came true."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def same(these: Sequence[Batch], those: Sequence[Batch]) -> bool:
    """To the bit."""
    return all(
        torch.equal(one, other)
        for batch, other_batch in zip(these, those, strict=True)
        for one, other in zip(batch, other_batch, strict=True)
    )


def closed(feeds: Sequence[Feed]) -> None:
    """Close them; no worker process and no thread is left."""
    for feed in feeds:
        feed.close()
    assert not multiprocessing.active_children()
    assert "crossbow data" not in {thread.name for thread in threading.enumerate()}
