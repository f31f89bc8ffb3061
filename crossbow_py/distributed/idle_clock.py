"""The time in which a rank does nothing but wait for other ranks. The slowest rank is the one that waits the least.

All ranks take the same time for a round, as they wait for each other. What a rank needs by itself is that time without
its waits. A wait beside which learners compute, as averaging beside the next round's learning, costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class IdleClock:
    """Counts the seconds in which a thread waits for other ranks and none computes. Thread-safe.

    Args:
        clock: monotonic seconds.

    Attributes:
        seconds: the sum so far.
        by_device: whether the work is a device's, of which the host's threads know nothing. Their waits are then kept,
            for whoever knows how long the device had no work (`take_host_s`).
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.by_device = 0.0, False
        self._clock = clock
        self._host_s = 0.0
        self._computing: set[int] = set()  # threads
        self._num_waiting = 0
        self._counted_until_s = clock()
        self._lock = threading.Lock()

    @property
    def computing_threads(self) -> frozenset[int]:
        """Return the identifiers of the threads that compute now."""
        return frozenset(self._computing.copy())

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run a block that computes, apart from the waits in it."""
        own = threading.get_ident()
        with self._lock:
            self._count()
            self._computing.add(own)
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._computing.discard(own)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Run a block that waits for other ranks, and count the time in which no thread computes meanwhile."""
        own = threading.get_ident()
        with self._lock:
            begun_s = self._count()
            computes = own in self._computing
            self._computing.discard(own)
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._lock:
                ended_s = self._count()
                self._num_waiting -= 1
                if computes:
                    self._computing.add(own)
                if self.by_device:
                    self._host_s += ended_s - begun_s

    def _count(self) -> float:
        """Count the seconds since threads last began or ended to wait or to compute. Returns the time."""
        now_s = self._clock()
        if self._num_waiting and not self._computing and not self.by_device:
            self.seconds += now_s - self._counted_until_s
        self._counted_until_s = now_s
        return now_s

    def take_host_s(self) -> float:
        """Return the seconds that the host has waited since the last call, where the work is a device's."""
        with self._lock:
            taken, self._host_s = self._host_s, 0.0
        return taken

    def add(self, seconds: float) -> None:
        """Count seconds that were measured on a device."""
        with self._lock:
            self.seconds += seconds
