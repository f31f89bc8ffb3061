"""The search for the largest batch size on a real device: predicted by a line, and confirmed by rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Runs real rounds at a batch size and returns the bytes they took, or None if memory ran out.
Measure = Callable[[int], int | None]
_TOLERANCE = 0.02  # the relative accuracy of the answer
_MOST_TRIES = 12


@dataclass(frozen=True)
class Measured:
    """The result of a search.

    Attributes:
        batch_size: the largest batch size that ran within the limit; 0 if none did.
        points: all batch sizes tried, in order, with their bytes, or None if memory ran out.
    """

    batch_size: int
    points: tuple[tuple[int, int | None], ...]

    @property
    def bytes(self) -> int | None:
        """The bytes that the answer took."""
        return dict(self.points).get(self.batch_size)


def largest_measured(measure: Measure, limit_bytes: int, *, first: int, most: int) -> Measured:
    """Return the largest batch size within the limit, to 2 % of itself; it is always one that was run.

    The first two tries are `first` and twice that. Each next one is where a line through two sizes that fitted, of
    which one is the largest, meets the limit, but at most four times the largest; after a failure it is below the size
    that failed, by a few percent at first and then more. It is always between the sizes that fitted and those that did
    not. The search ends when these are close, or after a dozen tries.

    Args:
        measure: runs rounds at a batch size.
        limit_bytes: the bytes that they may take.
        first: the first size to try, about a third of what is expected.
        most: the largest size to try.
    """
    fitted: dict[int, int] = {}
    points: list[tuple[int, int | None]] = []
    failed, failures = most + 1, 0
    candidate: int | None = min(first, most)
    while candidate is not None and len(points) < _MOST_TRIES:
        used = measure(candidate)
        points.append((candidate, used))
        if used is not None and used <= limit_bytes:
            fitted[candidate], failures = used, 0
        else:
            failed, failures = candidate, failures + 1
        candidate = _next(fitted, failed, failures, limit_bytes)
    return Measured(max(fitted, default=0), tuple(points))


def _next(fitted: dict[int, int], failed: int, failures: int, limit_bytes: int) -> int | None:
    """Return the next size to try after `failures` in a row; None if what fitted and what failed are close enough."""
    if not fitted:
        return failed // 2 or None
    largest = max(fitted)
    if failed - largest <= max(1, int(_TOLERANCE * largest)):
        return None
    guess = 2 * largest
    if len(fitted) > 1:
        others = sorted(fitted)[:-1]
        # Allocators take memory in steps, so that close sizes may need the same.
        below = max((size for size in others if size <= 0.75 * largest), default=others[0])
        slope = (fitted[largest] - fitted[below]) / (largest - below)
        guess = largest + int((limit_bytes - fitted[largest]) / slope) if slope > 0 else 4 * largest
    guess = min(guess, 4 * largest)
    if guess >= failed and failures:  # the line was wrong
        guess = max((largest + failed) // 2, int(failed * (1 - 1.5 * _TOLERANCE * 4 ** (failures - 1))))
    return min(max(guess, largest + max(1, int(_TOLERANCE * largest))), failed - 1)
