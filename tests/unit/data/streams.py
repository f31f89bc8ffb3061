"""Streams of batches: where ranks take them, whether two are the same, and that nothing is left of their feeds."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Sequence

import torch

from crossbow_py.data.feed import Batch, Feed


def counted_out(rank: int, num_ranks: int, num_own: int, batch_size: int, cursor: int, rounds: int) -> list[list[int]]:
    """A rank's positions in each round: all learners of all ranks take one batch after the other."""
    stream, mine = itertools.count(cursor, batch_size), []
    for _ in range(rounds):
        takers = [(r, next(stream)) for r in range(num_ranks) for _ in range(num_own)]
        mine.append([start for r, start in takers if r == rank])
    return mine


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
