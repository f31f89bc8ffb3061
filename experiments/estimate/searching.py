"""Two searches for the largest batch size that fits. Pure: what fits is asked of a function."""

from __future__ import annotations

from collections.abc import Callable

Fits = Callable[[int], bool]


def largest(fits: Fits, guess: int) -> int:
    """The largest b ≥ 0 that fits, 0 always does; what is larger than one that does not fit, does not fit either.

    Outwards from the guess in steps of 1, 2, 4, ..., then halving what is between. Two questions where the guess is
    right, and however wrong it is, the answer is one that was asked for, as is the next larger one.
    """
    assert guess >= 1, f"a batch has at least one sample, got {guess}"
    step = 1
    if fits(guess):
        low = guess
        while fits(low + step):
            low, step = low + step, 2 * step
        return bisect(fits, low, low + step)
    high = guess
    while high > step and not fits(high - step):
        high, step = high - step, 2 * step
    return bisect(fits, max(high - step, 0), high)


def doubling_search(fits: Fits) -> int:
    """The largest b ≥ 0 that fits, as batch size finders do: 1, 2, 4, ... until one does not, then halving."""
    high = 1
    while fits(high):
        high *= 2
    return bisect(fits, high // 2, high)


def bisect(fits: Fits, low: int, high: int) -> int:
    """The largest that fits of [low, high), where `low` is known to fit and `high` not to."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
