"""The time in which a rank does nothing but wait for other ranks. The slowest rank is the one that waits the least.

All ranks take the same time for a round, as they wait for each other. What a rank needs by itself is that time without
its waits. A wait beside which learners compute, as averaging beside the next round's learning, costs nothing.
"""

from __future__ import annotations

import math
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
        self._known_until_s = -math.inf  # when the last thread that computed was done, or the last wait was counted
        self._lock = threading.Lock()

    @property
    def computing_threads(self) -> frozenset[int]:
        """Return the identifiers of the threads that compute now."""
        return frozenset(self._computing.copy())

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run a block that computes, apart from the waits in it."""
        own = threading.get_ident()
        self._computing.add(own)
        try:
            yield
        finally:
            self._computing.discard(own)
            self._known_until_s = self._clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Run a block that waits for other ranks, and count what of it was spent on nothing else."""
        own, begun_s = threading.get_ident(), self._clock()
        computes = own in self._computing
        self._computing.discard(own)
        try:
            yield
        finally:
            with self._lock:
                self._count(begun_s)
            if computes:
                self._computing.add(own)

    def _count(self, begun_s: float) -> None:
        now_s = self._clock()
        if self.by_device:
            self._host_s += now_s - begun_s
        elif not self._computing:
            self.seconds += max(0.0, now_s - max(begun_s, self._known_until_s))
            self._known_until_s = now_s

    def take_host_s(self) -> float:
        """Return the seconds that the host has waited since the last call, where the work is a device's."""
        with self._lock:
            taken, self._host_s = self._host_s, 0.0
        return taken

    def add(self, seconds: float) -> None:
        """Count seconds that were measured on a device."""
        with self._lock:
            self.seconds += seconds
