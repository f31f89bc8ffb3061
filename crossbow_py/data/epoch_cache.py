"""Tables worked out once an epoch and shared by all threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Learners stand in at most two epochs at once; a third absorbs a reader elsewhere, such as BatchNorm recalibration.
EPOCHS_KEPT = 3


class EpochCache(Generic[T]):
    """Calls `build(epoch)` once for every epoch in use, under a lock that other threads then wait for."""

    def __init__(self, build: Callable[[int], T]) -> None:
        self._build = build
        self._tables: OrderedDict[int, T] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, epoch: int) -> T:
        """The table of `epoch`; the least recently used one beyond the third is forgotten."""
        with self._lock:
            if epoch not in self._tables:
                self._tables[epoch] = self._build(epoch)
            self._tables.move_to_end(epoch)
            if len(self._tables) > EPOCHS_KEPT:
                self._tables.popitem(last=False)
            return self._tables[epoch]
