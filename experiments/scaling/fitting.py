"""α and β from measured all-reduces, and how well a log-normal distribution describes measured tasks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev

import numpy as np

from experiments.scaling.simulator import log_sigma


@dataclass(frozen=True)
class Line:
    """Seconds = `fixed_s` + bytes · `s_a_byte`; of a ring of n, fixed_s = 2·(n−1)·α and s_a_byte = 2·(n−1)/(n·β)."""

    fixed_s: float
    s_a_byte: float

    def seconds(self, num_bytes: float) -> float:
        """At that size."""
        return self.fixed_s + num_bytes * self.s_a_byte

    def alpha_s(self, ranks: int) -> float:
        """α of a ring."""
        return self.fixed_s / (2 * (ranks - 1))

    def bytes_per_s(self, ranks: int) -> float:
        """β of a ring."""
        return 2 * (ranks - 1) / ranks / self.s_a_byte


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line with the smallest sum of squared relative errors: microseconds and tens of milliseconds count alike."""
    taken = np.asarray(seconds)
    columns = np.stack([1 / taken, np.asarray(sizes) / taken], axis=1)
    fixed_s, s_a_byte = np.linalg.lstsq(columns, np.ones(len(taken)), rcond=None)[0]
    return Line(max(0.0, float(fixed_s)), max(0.0, float(s_a_byte)))


def between(sizes: Sequence[int], seconds: Sequence[float], num_bytes: float) -> float:
    """Seconds at a size between measured ones, on straight lines between the logarithms; α and β beyond the last."""
    return float(np.exp(np.interp(math.log(num_bytes), np.log(sizes), np.log(seconds))))


def variation(seconds: Sequence[float]) -> dict[str, float]:
    """The tasks' coefficient of variation, and their quantiles by those of a log-normal with the same mean and it.

    A ratio of 1 says that the distribution has as much weight out there as measured.
    """
    mean = fmean(seconds)
    cv = pstdev(seconds) / mean
    sigma, ordered = log_sigma(cv), sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    return {
        "cv": round(cv, 4),
        "median_by_lognormal": round(median(seconds) / (mean * math.exp(-(sigma**2) / 2)), 3),
        "p95_by_lognormal": round(p95 / (mean * math.exp(1.6449 * sigma - sigma**2 / 2)), 3),
        "n": len(seconds),
    }
