"""Which sample stands where: a continuous stream of per-epoch permutations. Pure functions of values.

Position p of the stream, counted in samples, lies in epoch e = p // N and holds `epoch_order(seed, e, N)[p % N]`. A
batch is any run of positions: it may cross an epoch's end and is never partial.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from crossbow_py.data.randomness import permutation

T = TypeVar("T")


def epoch_order(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    """The order [N] in which epoch `epoch` visits the samples."""
    return permutation(seed, "sample order", epoch, num_samples)


def segments(start: int, count: int, num_samples: int) -> list[tuple[int, int, int]]:
    """Stream positions [start, start + count) as runs (epoch, first, last) of places in that epoch, last excluded."""
    runs = []
    position, end = start, start + count
    while position < end:
        epoch, first = divmod(position, num_samples)
        last = min(num_samples, first + end - position)
        runs.append((epoch, first, last))
        position += last - first
    return runs


def cut_up(items: Sequence[T], at_most: int) -> list[list[T]]:
    """`items` [>= 1] in as few runs as can be, of nearly equal length and none longer than `at_most`."""
    parts = -(-len(items) // at_most)
    edges = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[first:last]) for first, last in itertools.pairwise(edges)]
