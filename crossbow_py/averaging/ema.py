"""The exponential moving average (EMA) of the central average model z: when it moves, and how far.

With a horizon of h samples, t samples seen so far and n of them since the EMA last moved::

    d   ← min(exp(−n/h), 1 − n/t)
    ema ← d·ema + (1 − d)·z

Up to t ≈ h the second term is the smaller one: the EMA is the plain mean of z over the samples seen, and the initial
weights are not in it, as the first d is 0. From then on what a z counts for falls to 1/e in h samples. So the horizon
in effect is min(h, t), as in the code of Mean Teacher (Tarvainen and Valpola, NeurIPS 2017), whose decay is
min(α, 1 − 1/(step + 1)). With TensorFlow's min(α, (1 + step)/(10 + step)) it is t/9 at first, and h comes into effect
after 9·h samples only.

All is counted in samples, so that it means the same however many learners there are.
"""

from __future__ import annotations

import math

MOVES, IN_AN_EPOCH = 20, 4  # in a horizon, and at least in an epoch; of the models in between, none counts


def is_due(before: int, after: int, horizon: float, samples_per_epoch: int) -> bool:
    """Whether the EMA moves after a round that led from `before` to `after` samples seen; `horizon` is h, in samples.

    It moves wherever a multiple of h/20 is passed, or of a quarter of an epoch where that is less; or after every round
    where these are longer.
    """
    apart = max(1.0, min(horizon / MOVES, samples_per_epoch / IN_AN_EPOCH))
    return (after + 0.5) // apart > (before + 0.5) // apart  # multiples are rounded to whole samples


def decay(since: int, samples: int, horizon: float) -> float:
    """d, from 0 to 1, with `samples` seen and `since` of them since the EMA last moved; `horizon` is h, in samples."""
    return min(math.exp(-since / horizon), 1 - since / samples) if samples else 0.0
