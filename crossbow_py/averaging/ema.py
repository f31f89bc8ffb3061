"""The exponential moving average (EMA) of the central average model z: equations.

With a horizon of h samples, t samples seen so far and n of them since the EMA last moved::

    d   ← min(exp(−n/h), (1 − n/t)¹⁰)
    ema ← d·ema + (1 − d)·z

Up to t ≈ 10·h the second term is the smaller one: the weight of each z is in proportion to the 9th power of its t
(Karras et al., CVPR 2024), so that the effective horizon is t/10, and the initial weights, with d = 0 at first, have
none. So an EMA of a model that still learns fast is not behind it. From then on the weight of each z falls to 1/e in h
samples.

Everything is counted in samples, so that it does not depend on the number of learners.
"""

from __future__ import annotations

import math

_SHARE = 10  # the horizon is at most this part of the samples so far
MOVES, IN_AN_EPOCH = 20, 4  # moves in a horizon, and the least in an epoch; models between moves do not count


def is_due(before: int, after: int, horizon: float, samples_per_epoch: int) -> bool:
    """Return whether the EMA moves after a round from `before` to `after` samples seen; `horizon` is h, in samples.

    It moves when a multiple of h/20, or of a quarter of an epoch if that is less, has been passed: at most once a
    round.
    """
    apart = max(1.0, min(horizon / MOVES, samples_per_epoch / IN_AN_EPOCH))
    return (after + 0.5) // apart > (before + 0.5) // apart  # multiples are rounded to whole samples


def decay(since: int, samples: int, horizon: float) -> float:
    """Return d, in [0, 1].

    Args:
        since: n, the samples seen since the EMA last moved.
        samples: t, the samples seen in all.
        horizon: h, in samples.
    """
    return min(math.exp(-since / horizon), (1 - since / samples) ** _SHARE) if samples else 0.0
