"""The largest batch size on a device that can be tried: predicted by a line, and confirmed by real rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Measures real rounds at a batch size: the bytes they took, or None when memory ran out.
Measure = Callable[[int], int | None]


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


def largest_measured(
    measure: Measure,
    limit_bytes: int,
    *,
    first: int,
    most: int,
    tolerance: float = 0.02,
    max_tries: int = 10,
) -> Measured:
    """The largest batch size within the limit, to `tolerance` of itself; nothing is returned that was not run.

    The first two points are `first` and twice that. Every next one is where a line through the two largest that fitted
    meets the limit, or a few percent below what has just failed; in any case between what fitted and what did not. It
    ends when these are a `tolerance` apart, or after `max_tries`.

    Args:
        measure: runs rounds at a batch size.
        limit_bytes: what they may take.
        first: where to begin; a small one.
        most: no larger one is tried.
        tolerance: how near the answer must be.
        max_tries: how often `measure` is called at most.
    """
    fitted: dict[int, int] = {}
    points: list[tuple[int, int | None]] = []
    failed = most + 1
    candidate: int | None = min(first, most)
    while candidate is not None and len(points) < max_tries:
        taken = measure(candidate)
        points.append((candidate, taken))
        if taken is not None and taken <= limit_bytes:
            fitted[candidate] = taken
        else:
            failed = candidate
        candidate = _next(fitted, failed, limit_bytes, tolerance)
    return Measured(max(fitted, default=0), tuple(points))


def _next(fitted: dict[int, int], failed: int, limit_bytes: int, tolerance: float) -> int | None:
    """What to try next; None when what fitted and what failed are near enough."""
    if not fitted:
        return failed // 2 or None
    largest = max(fitted)
    if failed - largest <= max(1, int(tolerance * largest)):
        return None
    guess = 2 * largest
    if len(fitted) > 1:
        below = max(size for size in fitted if size < largest)
        slope = (fitted[largest] - fitted[below]) / (largest - below)
        guess = largest + int((limit_bytes - fitted[largest]) / slope) if slope > 0 else guess
    if guess >= failed:  # the line has been wrong: a few percent below what failed, and ever less
        guess = max((largest + failed) // 2, int(failed * (1 - 1.5 * tolerance)))
    return min(max(guess, largest + max(1, int(tolerance * largest))), failed - 1)
