"""The order of samples: a continuous stream of per-epoch permutations. Pure functions of values.

Position p of the stream, counted in samples, is in epoch e = p // N and holds `epoch_order(seed, e, N)[p % N]`. A
batch is any run of positions: it may cross an epoch's end and is never partial. With weights an epoch is N draws with
replacement, `weighted_order`, instead of a permutation.

A round takes K·R adjacent batches from the cursor on: rank r of R, with K learners of its own, takes those at
cursor + (r·K + j)·B for j < K. So a rank's next batches are K·R·B positions further on, for every rank and cursor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from crossbow_py.data.randomness import permutation, uniform

T = TypeVar("T")


def epoch_order(seed: int, epoch: int, num_samples: int) -> npt.NDArray[np.int64]:
    """Return the order, int64 [N], in which epoch `epoch` visits the samples."""
    return permutation(seed, "sample order", epoch, num_samples)


def weighted_order(seed: int, epoch: int, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return N draws with replacement, int64 [N], in which sample i has the probability w_i / Σ w, `weights` [N].

    A sample of weight 0 is never drawn. As in `torch.utils.data.WeightedRandomSampler`, draws are independent.
    """
    edges = np.cumsum(weights)
    places = uniform(seed, "weighted sample order", epoch, len(weights)) * edges[-1]
    last = np.flatnonzero(weights)[-1]  # a product may round up to the end
    drawn: npt.NDArray[np.int64] = np.searchsorted(edges, places, "right").clip(max=last).astype(np.int64, copy=False)
    return drawn


@dataclass(frozen=True, eq=False)
class SampleOrder:
    """The order of samples in every epoch: a permutation, or draws by weights; of a data set, or of a subset of it.

    Attributes:
        seed: the seed.
        num_samples: N, of the subset if there is one.
        weights: float64 [N], not negative; None for permutations.
        subset: int64 [N], the places of the samples in the data set, which may repeat; None for all of them.
    """

    seed: int
    num_samples: int
    weights: npt.NDArray[np.float64] | None = None
    subset: npt.NDArray[np.int64] | None = None

    def in_data(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the places in the data set of samples that are numbered within the subset."""
        return ids if self.subset is None else self.subset[ids]

    def ids(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples of an epoch in their order, int64 [N], numbered within the subset."""
        if self.weights is None:
            return epoch_order(self.seed, epoch, self.num_samples)
        return weighted_order(self.seed, epoch, self.weights)

    def draws(self, ids: npt.NDArray[np.int64], first: int = 0) -> npt.NDArray[np.int64]:
        """Return the numbers by which the augmentation of an epoch's samples is drawn; the first is at place `first`.

        These are the samples, or their places if a sample may come several times, so that each time it looks different.
        """
        return ids if self.weights is None else np.arange(first, first + len(ids), dtype=np.int64)


def balanced_weights(labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return weights [N] by which every class is drawn as often as another: 1 / the count of the sample's class.

    Samples of negative labels, which losses leave out, have weight 0.
    """
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights: npt.NDArray[np.float64] = np.where(labels < 0, 0.0, 1.0 / counts[inverse])
    return weights


def segments(start: int, count: int, num_samples: int) -> list[tuple[int, int, int]]:
    """Return stream positions [start, start + count) as runs (epoch, first, last) within epochs, last excluded."""
    runs = []
    position, end = start, start + count
    while position < end:
        epoch, first = divmod(position, num_samples)
        last = min(num_samples, first + end - position)
        runs.append((epoch, first, last))
        position += last - first
    return runs


def cut_up(items: Sequence[T], at_most: int) -> list[list[T]]:
    """Cut at least one item into as few runs as possible, of nearly equal length and none longer than `at_most`."""
    parts = -(-len(items) // at_most)
    edges = [len(items) * part // parts for part in range(parts + 1)]
    return [list(items[first:last]) for first, last in itertools.pairwise(edges)]


class Positions(Protocol):
    """Increasing stream positions of batches, in the order in which they are taken. A `range` is one."""

    def __getitem__(self, index: int, /) -> int:
        """Return the position of batch number `index`, from 0 on."""


@dataclass(frozen=True)
class RankPositions:
    """The positions of a rank's batches from a round on: this round's, the next round's, and so on without end.

    Attributes:
        own: this round's positions, increasing; the learners' batches are adjacent.
        batch_size: samples a batch.
        num_ranks: R, ranks that each take as many batches a round.
    """

    own: tuple[int, ...]
    batch_size: int
    num_ranks: int

    def __getitem__(self, index: int, /) -> int:
        """Return the position of batch j of the n-th round from here, counted from 0, for index = n·K + j."""
        num_own = len(self.own)
        rounds, j = divmod(index, num_own)
        if rounds == 0:
            return self.own[j]
        return self.own[-1] + ((rounds * self.num_ranks - 1) * num_own + 1 + j) * self.batch_size


def joins(path: Positions, at: int, other: Positions, index: int, soon: int) -> bool:
    """Return whether `path`, from its number `at` on, reaches `other[index]` and follows `other` from there.

    At most `soon` positions may come before it, and as many after it are compared. K of them are enough to tell a path
    with another K, or at another learner, from one that agrees for ever.
    """
    for number in range(at, at + soon + 1):
        if path[number] == other[index]:
            return all(path[number + more] == other[index + more] for more in range(1, soon + 1))
    return False
