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

    def __init__(self, build: Callable[[Key], T], kept: int = EPOCHS_KEPT) -> None:
        self._build, self.kept = build, kept
        self._tables: OrderedDict[Key, T] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, epoch: Key) -> T:
        """The table of `epoch`."""
        with self._lock:
            if epoch not in self._tables:
                self._tables[epoch] = self._build(epoch)
            self._tables.move_to_end(epoch)
            while len(self._tables) > self.kept:
                self._tables.popitem(last=False)
            return self._tables[epoch]
