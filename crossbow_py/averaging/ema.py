"""The exponential moving average (EMA) of the central average model z: equations.

With a horizon of h samples, t samples seen so far and n of them since the EMA last moved::

    d   ← min(exp(−n/h), 1 − n/t)
    ema ← d·ema + (1 − d)·z

Up to t ≈ h the second term is the smaller one: the EMA is the plain mean of z over the samples seen, without the
initial weights, because the first d is 0. From then on the weight of each z falls to 1/e in h samples. The effective
horizon is thus min(h, t), as in the code of Mean Teacher (Tarvainen and Valpola, NeurIPS 2017), whose decay is
min(α, 1 − 1/(step + 1)). With TensorFlow's min(α, (1 + step)/(10 + step)) it is t/9 at first, and reaches h only after
9·h samples.

Everything is counted in samples, so that it does not depend on the number of learners.
"""

from __future__ import annotations

import math

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
    return min(math.exp(-since / horizon), 1 - since / samples) if samples else 0.0
