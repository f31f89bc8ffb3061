"""A thread that makes batches ahead, and the prefetch buffer it puts them into."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from crossbow_py.data.feed import Batch
from crossbow_py.data.sampler import Positions, joins
from crossbow_py.data.streaming.loader import Loader
from crossbow_py.data.streaming.streamed_data import Loaded

_CHECK_EVERY_S = 0.25
_PATIENCE_S = 2.0  # for workers to finish a batch when they are stopped


class Staged(NamedTuple):
    """A batch on its way to learners.

    Attributes:
        batch: as it was loaded, on the device.
        draws: int32 [B, R] on the device, the random numbers of its augmentation, see `Preparation`; None for none.
        copied: on CUDA, the event that the copies to the device record.
    """

    batch: Batch
    draws: Tensor | None = None
    copied: torch.cuda.Event | None = None


Stage = Callable[[int, Loaded], Staged]


class PrefetchBuffer:
    """Batches by their position in the stream. Thread-safe: one producer puts batches, other threads wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: dict[int, Staged] = {}
        self._horizon = -1
        self._failure: BaseException | None = None

    def starts(self) -> set[int]:
        """Return the positions of the batches that are there."""
        with self._changed:
            return set(self._batches)

    def get(self, start: int) -> Staged | None:
        """Return a batch, which stays in the buffer; None if it is not there."""
        with self._changed:
            return self._batches.get(start)

    def wait_for(self, start: int, timeout_s: float) -> bool:
        """Block for at most `timeout_s` and return whether the batch is there.

        Raises the producer's error if it failed before that batch.
        """
        with self._changed:
            if start not in self._batches and self._failure is None:
                self._changed.wait(timeout_s)
            if start not in self._batches and self._failure is not None:
                raise self._failure
            return start in self._batches

    def keep(self, starts: Collection[int]) -> None:
        """Drop all batches but these."""
        with self._changed:
            self._batches = {start: batch for start, batch in self._batches.items() if start in starts}

    def allow(self, horizon: int) -> None:
        """Allow batches up to the position `horizon`."""
        with self._changed:
            self._horizon = horizon
            self._changed.notify_all()

    def has_room(self, start: int, stopped: threading.Event) -> bool:
        """Block while the batch lies beyond the horizon. Return False once `stopped` is set."""
        with self._changed:
            self._changed.wait_for(lambda: stopped.is_set() or start <= self._horizon)
            return not stopped.is_set()

    def put(self, start: int, batch: Staged) -> None:
        """Put a batch into the buffer."""
        with self._changed:
            self._batches[start] = batch
            self._changed.notify_all()

    def fail(self, failure: BaseException | None) -> None:
        """Keep the error after which there are no more batches, for those who wait; None clears an earlier one."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a blocked `has_room` check whether it is stopped."""
        with self._changed:
            self._changed.notify_all()


class Producer:
    """A thread that fills a prefetch buffer, batch after batch, until it is stopped or fails.

    Args:
        buffer: receives the batches, and the failure.
        loader: loads the batches; used and closed by the thread.
        stage: makes the buffer's entry of a position and its loaded batch; called in the thread, may raise.
        positions: the batches' positions in the stream, at least as many as the loader has batches.
        index: the number of the loader's first batch among the positions.
    """

    def __init__(
        self, buffer: PrefetchBuffer, loader: Loader, stage: Stage, positions: Positions, index: int = 0
    ) -> None:
        self._buffer, self._loader, self._stage = buffer, loader, stage
        self._positions, self._index = positions, index  # only the thread writes the index
        self._stopped = threading.Event()
        buffer.fail(None)
        self._thread = threading.Thread(target=self._run, name="crossbow data", daemon=True)
        self._thread.start()

    def reaches(self, positions: Positions, index: int, soon: int) -> bool:
        """Return whether it makes the batches from `positions[index]` on, after at most `soon` others."""
        return joins(self._positions, self._index, positions, index, soon)

    def wait_for(self, start: int, until: Callable[[], bool] = lambda: False) -> None:
        """Block until a batch is there, or until `until` returns True.

        Raises DataError if a worker process is dead or hangs, or the thread's own error.
        """
        while not self._buffer.wait_for(start, _CHECK_EVERY_S) and not until():
            self._loader.check()

    def close(self) -> None:
        """End the thread and the processes. Processes that do not answer are killed. Does not raise."""
        self._stopped.set()
        self._loader.stop()
        self._buffer.wake()
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():  # a worker that hangs keeps a DataLoader from closing
            self._loader.kill()
            self._thread.join()

    def _run(self) -> None:
        try:
            for loaded in self._loader:
                start = self._positions[self._index]
                if not self._buffer.has_room(start, self._stopped):
                    return
                self._buffer.put(start, self._stage(start, loaded))
                self._index += 1
        except BaseException as error:
            self._buffer.fail(error)
            self._loader.kill()  # the error's traceback keeps the loader alive, and with it its processes
        finally:
            self._loader.close()


class Prefetcher(Producer):
    """An iterator over a loader's staged batches, made a few ahead of the caller."""

    def __init__(self, loader: Loader, stage: Stage) -> None:
        super().__init__(PrefetchBuffer(), loader, stage, range(sys.maxsize))
        self._few, self._next = 2 * max(1, loader.num_workers), 0

    def __next__(self) -> Staged:
        """Return the next batch, which there must be. Raises as `Producer.wait_for`."""
        self._buffer.keep(range(self._next, self._next + self._few + 1))
        self._buffer.allow(self._next + self._few)
        self.wait_for(self._next)
        found = self._buffer.get(self._next)
        assert found is not None, "the batch is there after waiting for it"
        self._next += 1
        return found
