"""The largest batch size on a device that can be tried: predicted by a line, and confirmed by real rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Measures real rounds at a batch size: the bytes they took, or None when memory ran out.
Measure = Callable[[int], int | None]
_TOLERANCE = 0.02  # how near the answer must be, of itself
_MOST_TRIES = 12


@dataclass(frozen=True)
class Measured:
    """What a search found.

    Attributes:
        batch_size: the largest one that was run and stayed within the limit; 0 when none did.
        points: (batch size, bytes, or None where memory ran out) of everything that was tried, in that order.
    """

    batch_size: int
    points: tuple[tuple[int, int | None], ...]

    @property
    def bytes(self) -> int | None:
        """What the answer took."""
        return dict(self.points).get(self.batch_size)


def largest_measured(measure: Measure, limit_bytes: int, *, first: int, most: int) -> Measured:
    """The largest batch size within the limit, to 2 % of itself; nothing is returned that was not run.

    The first two points are `first` and twice that. Every next one is where a line through two that fitted, the largest
    one of them, meets the limit, at most four times as far; or below what has just failed, by a few percent at first
    and ever more; in any case between what fitted and what did not. It ends when these are so near each other, or
    after a dozen tries.

    Args:
        measure: runs rounds at a batch size.
        limit_bytes: what they may take.
        first: where to begin: about a third of what is expected.
        most: no larger one is tried.
    """
    fitted: dict[int, int] = {}
    points: list[tuple[int, int | None]] = []
    failed, failures = most + 1, 0
    candidate: int | None = min(first, most)
    while candidate is not None and len(points) < _MOST_TRIES:
        taken = measure(candidate)
        points.append((candidate, taken))
        if taken is not None and taken <= limit_bytes:
            fitted[candidate], failures = taken, 0
        else:
            failed, failures = candidate, failures + 1
        candidate = _next(fitted, failed, failures, limit_bytes)
    return Measured(max(fitted, default=0), tuple(points))


def _next(fitted: dict[int, int], failed: int, failures: int, limit_bytes: int) -> int | None:
    """What to try next; None when what fitted and what failed, `failures` times in a row, are near enough."""
    if not fitted:
        return failed // 2 or None
    largest = max(fitted)
    if failed - largest <= max(1, int(_TOLERANCE * largest)):
        return None
    guess = 2 * largest
    if len(fitted) > 1:
        others = sorted(fitted)[:-1]
        # Allocators take memory in steps, so that neighbours may need the same.
        below = max((size for size in others if size <= 0.75 * largest), default=others[0])
        slope = (fitted[largest] - fitted[below]) / (largest - below)
        guess = largest + int((limit_bytes - fitted[largest]) / slope) if slope > 0 else 4 * largest
    guess = min(guess, 4 * largest)
    if guess >= failed and failures:  # the line was wrong
        guess = max((largest + failed) // 2, int(failed * (1 - 1.5 * _TOLERANCE * 4 ** (failures - 1))))
    return min(max(guess, largest + max(1, int(_TOLERANCE * largest))), failed - 1)
