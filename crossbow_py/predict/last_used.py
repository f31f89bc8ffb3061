"""What is made for a key and kept while it is used: a bounded number of values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LastUsed(Generic[Key, Value]):
    """The values that were used last. Not thread-safe.

    Args:
        most: how many are kept, at least 1.
        drop: is given each one that is kept no more.
    """

    def __init__(self, most: int, drop: Callable[[Value], None] = lambda _: None) -> None:
        assert most >= 1, f"{most} values keep nothing"
        self._most, self._drop = most, drop
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def of(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key, made where it is not kept; only then the one that was used least lately is dropped."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        while len(self._values) > self._most:
            self._drop(self._values.popitem(last=False)[1])
        return self._values[key]

    def clear(self) -> None:
        """Drop all."""
        while self._values:
            self._drop(self._values.popitem()[1])
