"""The interface of a feed: batches by position in the sample stream, ready on the device.

A feed keeps no cursor. `batch(start)` is a function of the stream position (and the seed), so learners ask in any order
and from any thread, and a resumed run needs only the number of samples seen.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from crossbow_py.core.errors import UserError
from crossbow_py.core.trees import Tree, map_tree
from crossbow_py.data.datasets import Classes
from crossbow_py.data.normalisation import Loses, rounding_note

# Each learner's batch in one piece, or the channels of all learners side by side.
MemoryOrder = Literal["stacked", "channels"]
# Learners are in at most two epochs at once; a third leaves room for another reader, such as BatchNorm recalibration.
EPOCHS_KEPT = 3

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


class Batch(NamedTuple):
    """Inputs [B, ...], a tensor or a tree of them, and targets [B, ...], on the feed's device."""

    inputs: Tree
    targets: Tensor

    @property
    def size(self) -> int:
        """B, of the batch of one learner."""
        return len(self.targets)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function of each tensor in its place."""
        return Batch(map_tree(function, self.inputs), function(self.targets))

    def parts(self, count: int, dim: int = 0) -> list[Batch]:
        """Return `count` micro-batches, views along a dimension, of sizes that differ by one sample at most."""

        def part(n: int) -> Batch:
            return self.map(lambda own: torch.tensor_split(own, count, dim)[n])

        return [part(n) for n in range(count)]


def stacked(batches: Sequence[Batch]) -> Batch:
    """Return batches of one form as one, `[K, B, ...]`."""
    inputs, targets = zip(*batches, strict=True)
    return Batch(map_tree(lambda *each: torch.stack(each), *inputs), torch.stack(targets))


class Feed(ABC):
    """Base of all feeds. Thread-safe: every method may be called from several threads at once.

    Attributes:
        STREAMS: whether batches are made while training goes on, so that they may be late.
        num_workers: processes that load batches.
        one_shape: whether all batches are of one shape, so that those of several learners can be put together.
        rounded: what the dtype of batches loses of inputs and targets, None if nothing was seen yet.
        mixing: mixes training batches, given where they start, as `Mixing` does; None for none.
    """

    STREAMS: ClassVar[bool] = False
    num_workers: int = 0
    one_shape: bool = True
    rounded: Loses | None = None
    mixing: Callable[[Batch, int], Batch] | None = None

    def __init__(self, num_samples: int, batch_size: int) -> None:
        """Check the batch size. Raises UserError if a batch would be larger than the data set."""
        if not 1 <= batch_size <= num_samples:
            has = f"the size of the data set, which has {num_samples} samples; choose at most {num_samples}"
            raise UserError(f"batch_size={batch_size} must be between 1 and {has}.")
        self.num_samples, self.batch_size = num_samples, batch_size
        self._notes: list[str] = []

    @abstractmethod
    def batch(self, start: int) -> Batch:
        """Return the augmented training batch at stream positions [start, start + batch_size).

        On CUDA it is enqueued on the calling thread's current stream; the host does not block.
        """

    def batches(self, starts: Sequence[int]) -> Batch:
        """Return the batches at `starts`, one a learner, stacked: inputs [K, B, ...] and targets [K, B, ...]."""
        return stacked([self.batch(start) for start in starts])

    @abstractmethod
    def evaluation_batches(self, batch_size: int, first: int = 0, step: int = 1) -> Iterator[Batch]:
        """Yield all samples once, in the data set's order and not augmented. The last batch may be partial.

        Only the batches numbered `first`, `first + step`, ... are made: rank r of R takes (r, R), which is empty if
        there are no more than r batches.
        """

    def mixed(self, batch: Batch, start: int) -> Batch:
        """Return the training batch at `start`, mixed if batches are."""
        return batch if self.mixing is None else self.mixing(batch, start)

    def aside(self, starts: Sequence[int]) -> Generator[Batch, None, None]:
        """Yield the batches at `starts` one by one, for a measurement. What is announced stays as it is.

        Close the generator if not all batches were taken.
        """
        for start in starts:
            yield self.batch(start)

    def first_samples(self, count: int) -> Batch:
        """Return the first `count` samples, not augmented, to try a model on."""
        return next(self.evaluation_batches(count))

    def look_through(self, count: int) -> None:
        """Look for `rounded` in about `count` samples spread over the data set, unless all have been checked."""

    def check_labels(self, classes: Classes, what: str) -> None:
        """Check that integer targets are among the classes: all of them now, or each from now on as it is loaded.

        Raises UserError, in which `what` names the data.
        """

    def may_have_target(self, target: int) -> bool:
        """Return whether a sample may have such an integer target; True if the targets were not searched."""
        return True

    def for_measuring(self) -> Feed:
        """Return a feed of batches like this one's that never make learners wait, to measure their speed."""
        return self

    def announce(self, starts: Sequence[int]) -> bool:
        """Announce where the next round's batches begin, so that they are made ahead. Return whether all are ready.

        Called once a round, before any of its batches is asked for. Batches of rounds before the last are dropped.
        """
        return True

    def wait(self, starts: Sequence[int], until: Callable[[], bool] = lambda: False) -> None:
        """Block until the announced batches are ready, or until `until`, which is polled, returns True.

        Raises DataError if they cannot be made.
        """

    def take_notes(self) -> list[str]:
        """Return the sentences for the user since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def note(self, sentence: str) -> None:
        """Add a sentence for the user."""
        self._notes.append(sentence)

    def note_rounding(self, rounded: Loses | None, dtype: torch.dtype) -> None:
        """Keep the first loss of digits that was found, and add a note for the user."""
        if rounded is not None and self.rounded is None:
            self.rounded = rounded
            self._notes.append(rounding_note(rounded, dtype))

    def close(self) -> None:
        """Stop threads and processes. A feed that is used again starts them again. Does not raise."""


class EpochCache(Generic[Key, T]):
    """Tables built once an epoch by `build(key)` and shared by all threads, under a lock that the others wait for.

    Keys hold the epoch, and what tells several streams apart.

    Attributes:
        kept: how many tables are kept at most; the least recently used ones are dropped.
    """

    def __init__(self, build: Callable[[Key], T]) -> None:
        self._build, self.kept = build, EPOCHS_KEPT
        self._readers: dict[int, int] = {}
        self._tables: OrderedDict[Key, T] = OrderedDict()
        self._lock = threading.Lock()

    def serve(self, reader: int, num_positions: int) -> None:
        """Keep tables for a reader at `num_positions` positions, each in at most two epochs; 0 once it has gone."""
        with self._lock:
            self._readers[reader] = num_positions
            self.kept = max(EPOCHS_KEPT, 2 * sum(self._readers.values()) + 1)

    def __call__(self, epoch: Key) -> T:
        """Return the table of `epoch`, built if it is not kept."""
        with self._lock:
            if epoch not in self._tables:
                self._tables[epoch] = self._build(epoch)
            self._tables.move_to_end(epoch)
            while len(self._tables) > self.kept:
                self._tables.popitem(last=False)
            return self._tables[epoch]
