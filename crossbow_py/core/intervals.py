"""A mean with its 95 % confidence interval, by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

# Quantile 0.975 of Student's t for 1, 2, ... degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.95996


@dataclass(frozen=True)
class Estimate:
    """A mean of `n` values; `half_width` is that of its 95 % confidence interval.

    It is None for a single value, and where a value is not finite.
    """

    mean: float
    n: int
    half_width: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.half_width is None else f"{self.mean:.4g} ± {self.half_width:.2g}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean and its 95 % confidence interval by Student's t; None of nothing."""
    if not values:
        return None
    n, centre = len(values), mean(values)
    has_width = n > 1 and math.isfinite(centre)
    return Estimate(centre, n, student_t(n - 1) * stdev(values) / math.sqrt(n) if has_width else None)


def student_t(degrees: int) -> float:
    """Return the quantile 0.975 for so many degrees of freedom; beyond 30 by the first term of its expansion."""
    return _T[degrees - 1] if degrees <= len(_T) else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * degrees)
