"""Tables worked out once an epoch and shared by all threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")

# Learners stand in at most two epochs at once; a third absorbs a reader elsewhere, such as BatchNorm recalibration.
EPOCHS_KEPT = 3


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
