"""What a feed is: batches by position in the sample stream, ready on the device.

A feed keeps no cursor. `batch(start)` is a function of the stream position (and the seed), so learners ask in any order
and from any thread, and a resumed run needs nothing but the number of samples seen.
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
from crossbow_py.data.datasets import Classes, Rounded

# Each learner's batch in one piece, or the channels of all learners side by side.
MemoryOrder = Literal["stacked", "channels"]

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")
# Learners stand in at most two epochs at once; a third absorbs a reader elsewhere, such as BatchNorm recalibration.
EPOCHS_KEPT = 3


class Batch(NamedTuple):
    """inputs [B, ...] and targets [B, ...], on the feed's device."""

    inputs: Tensor
    targets: Tensor


class Feed(ABC):
    """Base of all feeds. Thread-safe: every method may be called from several threads at once.

    Attributes:
        STREAMS: whether batches are made while training goes on, so that they may be late.
        num_workers: processes that make them.
        rounded: an integer among the floating inputs that is another number in batches, if any was seen yet.
    """

    STREAMS: ClassVar[bool] = False
    num_workers: int = 0
    rounded: Rounded | None = None

    def __init__(self, num_samples: int, batch_size: int) -> None:
        """Raises UserError when a batch would be larger than the data set."""
        if not 1 <= batch_size <= num_samples:
            raise UserError(
                f"batch_size={batch_size} must be between 1 and the size of the data set, which has {num_samples} "
                f"samples; choose at most {num_samples}."
            )
        self.num_samples, self.batch_size = num_samples, batch_size
        self._notes: list[str] = []

    @abstractmethod
    def batch(self, start: int) -> Batch:
        """The training batch at stream positions [start, start + batch_size), augmented.

        On CUDA it is enqueued on the calling thread's current stream; the host does not wait for it.
        """

    def batches(self, starts: Sequence[int]) -> Batch:
        """The batches at `starts`, one a learner, stacked: inputs [K, B, ...] and targets [K, B, ...]."""
        each = [self.batch(start) for start in starts]
        return Batch(torch.stack([batch.inputs for batch in each]), torch.stack([batch.targets for batch in each]))

    @abstractmethod
    def evaluation_batches(self, batch_size: int, first: int = 0, step: int = 1) -> Iterator[Batch]:
        """All samples once, in the data set's order and not augmented by the feed; the last batch may be partial.

        Of these batches only those numbered `first`, `first + step`, ... are made: rank r of R takes the share (r, R),
        which is empty when there are no more than r batches.
        """

    def aside(self, starts: Sequence[int]) -> Generator[Batch, None, None]:
        """The batches at `starts`, one after the other, beside what is announced, which stays as it is: to measure on.

        Close it when not all of them were taken.
        """
        for start in starts:
            yield self.batch(start)

    def first_samples(self, count: int) -> Batch:
        """The first `count` samples, not augmented: to try a model on."""
        return next(self.evaluation_batches(count))

    def look_through(self, count: int) -> None:
        """Look for `rounded` in that many samples from all over the data set, where not all were looked at yet."""

    def check_labels(self, classes: Classes, what: str) -> None:
        """Refuse integer targets that are none of the classes: all of them now, or each as it is loaded from now on.

        Raises UserError, in which `what` names the data.
        """

    def may_have_target(self, target: int) -> bool:
        """Whether a sample may have such an integer target; True where nobody has looked."""
        return True

    def for_measuring(self) -> Feed:
        """A feed of batches like this one's that are always there: to measure with how fast learners are."""
        return self

    def announce(self, starts: Sequence[int]) -> bool:
        """Say where the next round's batches begin, so that they are made ahead. Whether all of them are there.

        Called once a round, before any of its batches is asked for; what earlier rounds but the last took is forgotten.
        """
        return True

    def wait(self, starts: Sequence[int], until: Callable[[], bool] = lambda: False) -> None:
        """Block until the announced batches are there, or `until`, asked now and then, says that it is enough.

        Raises DataError when they cannot be made.
        """

    def take_notes(self) -> list[str]:
        """Sentences for the user that came up since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def note_rounding(self, rounded: Rounded | None, dtype: torch.dtype) -> None:
        """Keep the first integer that was found, and tell the user of it."""
        if rounded is not None and self.rounded is None:
            self.rounded = rounded
            self._notes.append(rounded.sentence(dtype))

    def close(self) -> None:
        """Stop threads and processes; a feed that is asked again starts them again. Does not raise."""


class PickedFeed(Feed):
    """A feed that also loads in two steps, so that a CUDA graph can make the batch.

        picks, batches = feed.new_picks(K), feed.new_batches(K)    once
        feed.write_picks(starts, picks)                            every round, before the graph
        feed.take(picks, batches)                                  inside the graph

    Both give the same batches to the bit. Picks and batches are the caller's: it keeps one `write_picks` or `take` from
    overwriting what another stream or thread still reads.
    """

    @abstractmethod
    def new_picks(self, num_batches: int) -> Tensor:
        """Int64 [R, num_batches·B] on the device, for `write_picks`; until then they pick the first sample."""

    @abstractmethod
    def new_batches(self, num_batches: int, order: MemoryOrder = "stacked") -> Batch:
        """Zeros for `take`: inputs [num_batches, B, ...] and targets [num_batches, B, ...].

        The order "channels" is for images alone: their memory is `[B, H, W, num_batches, C]`, so that
        `inputs.transpose(0, 1).flatten(1, 2)` is what a grouped convolution takes, and a view.
        """

    @abstractmethod
    def write_picks(self, starts: Sequence[int], out: Tensor) -> None:
        """Write what makes up the batches at `starts`; one copy on the current stream, never inside a capture.

        The host waits only once an epoch, in the first call that reaches it. `out` is of `new_picks(len(starts))`.
        """

    @abstractmethod
    def take(self, picks: Tensor, out: Batch) -> None:
        """Make the batches that were picked; enqueued on the current stream, the host does not wait.

        Reads nothing but `picks` and what lies on the device, so a CUDA graph may hold it. `out` is of `new_batches`;
        a single batch may also be given as `[B, ...]`.
        """


class EpochCache(Generic[Key, T]):
    """Calls `build(epoch)` once for every epoch in use, under a lock that other threads then wait for.

    Epochs of several streams are told apart by what their keys hold besides the epoch.

    Attributes:
        kept: tables at most; the least recently used one beyond is forgotten.
    """

    def __init__(self, build: Callable[[Key], T]) -> None:
        self._build, self.kept = build, EPOCHS_KEPT
        self._readers: dict[int, int] = {}
        self._tables: OrderedDict[Key, T] = OrderedDict()
        self._lock = threading.Lock()

    def serve(self, reader: int, num_places: int) -> None:
        """Have a reader at so many places at once from now on, each in at most two epochs; 0 when it has gone."""
        with self._lock:
            self._readers[reader] = num_places
            self.kept = max(EPOCHS_KEPT, 2 * sum(self._readers.values()) + 1)

    def __call__(self, epoch: Key) -> T:
        """The table of `epoch`."""
        with self._lock:
            if epoch not in self._tables:
                self._tables[epoch] = self._build(epoch)
            self._tables.move_to_end(epoch)
            while len(self._tables) > self.kept:
                self._tables.popitem(last=False)
            return self._tables[epoch]



