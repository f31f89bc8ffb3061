"""Goodput: progress a second, which is throughput times how much of a sample's worth a larger batch makes use of.

K learners of batch size b have gradients g_j. From two norms, s = mean |g_j|² and q = |mean g_j|²::

    |G|²  ≈ (K·q − s) / (K − 1)                 the gradient without noise
    tr(Σ) ≈ b · (s − q) · K / (K − 1)           the noise of one sample's gradient
    φ     = mean tr(Σ) / mean |G|²              the gradient noise scale, in samples; both means over many rounds

and from that, for any K (McCandlish et al. 2018; Pollux, Qiao et al., OSDI 2021; AdaScale, Johnson et al., ICML 2020)::

    efficiency(K) = (φ + b) / (φ + K·b)         of a sample, to one of a single learner
    gain(K)       = K · efficiency(K)           how many rounds of a single learner one round is worth
    goodput(K)    = images/s(K) · efficiency(K)

All gradients of a comparison are at the same weights or, of replicas, as near as these are: one taken a step later
would lie against what the step before had of noise. So a single learner's are those of two halves of a batch that it
has not learned from yet.

φ is that of plain SGD. Other optimizers may use larger batches better, as Muon does (experiments/optimizers),
and replicas that are apart have gradients that differ more than by noise, which raises φ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from crossbow_py.core.settings import known_fields

EVERY_ROUNDS = 4  # gradients of several learners are compared in every so many rounds
EVERY_ROUNDS_ALONE = 32  # those of a single one, which takes two more passes: one round in 32 is 3 % of them
_HORIZON = 100  # comparisons; before there are as many, the mean is over all
_LEAST = 16  # comparisons before φ is used
ROUNDS_UNKNOWN = EVERY_ROUNDS * _LEAST  # from the first round to when it is

class Comparison(NamedTuple):
    """The gradients of n batches: mean |g_j|², and |mean g_j|²."""

    mean_square: float
    square_of_mean: float
    n: int

    @classmethod
    def of_halves(cls, mean_square: float, square_of_mean: float) -> Comparison:
        """Return what two whole batches would show on average, from the gradients of the two halves of one.

        With s and q of the halves: |G|² = 2q − s and tr(Σ)/b = s − q, of which s = |G|² + tr(Σ)/b and
        q = |G|² + tr(Σ)/2b of whole batches follow.
        """
        s, q = mean_square, square_of_mean
        return cls(q, (3 * q - s) / 2, 2)


def efficiency(scale: float, batch_size: int, num_learners: int) -> float:
    """Return how much a sample is worth with K learners of a batch size, in (0, 1], at a noise scale of φ samples."""
    return 1.0 if math.isinf(scale) else (scale + batch_size) / (scale + num_learners * batch_size)


def compares_in(round_index: int, num_learners: int, num_known: int) -> bool:
    """Return whether a round compares the gradients of a device's learners, after `num_known` comparisons.

    Until there are enough to tell φ, a single learner's are compared as often as those of several.
    """
    alone = num_learners == 1 and num_known >= _LEAST
    return round_index % (EVERY_ROUNDS_ALONE if alone else EVERY_ROUNDS) == 0


@dataclass(frozen=True)
class NoiseScale:
    """The estimate of the gradient noise so far; the default is none.

    Attributes:
        batch_size: b.
        variance: the mean of tr(Σ).
        squared_gradient: the mean of |G|²; negative where noise hides it.
        count: the comparisons so far.
    """

    batch_size: int
    variance: float = 0.0
    squared_gradient: float = 0.0
    count: int = 0

    def after(self, found: Sequence[Comparison]) -> NoiseScale:
        """Return what is known after comparisons; those of numbers that are not finite tell nothing."""
        return self.after_sums(*self.sums(found))

    def sums(self, found: Sequence[Comparison]) -> tuple[float, float, int]:
        """Return the sums of tr(Σ) and of |G|² by comparisons, and their number, for `after_sums`."""
        good = [each for each in found if each.n > 1 and math.isfinite(each.mean_square + each.square_of_mean)]
        variances = (self.batch_size * (s - q) * n / (n - 1) for s, q, n in good)
        return sum(variances), sum((n * q - s) / (n - 1) for s, q, n in good), len(good)

    def after_sums(self, variance: float, squared: float, count: int) -> NoiseScale:
        """Return what is known after comparisons of several ranks, of which all `sums` are added."""
        if not count:
            return self
        weight = min(1.0, count / min(self.count + count, _HORIZON))
        return NoiseScale(
            self.batch_size,
            self.variance + weight * (variance / count - self.variance),
            self.squared_gradient + weight * (squared / count - self.squared_gradient),
            self.count + count,
        )

    @property
    def samples(self) -> float | None:
        """φ, in samples: 0 without noise, infinite if noise hides the gradient, None until there is enough to tell."""
        if self.count < _LEAST:
            return None
        if self.variance <= 0:
            return 0.0
        return self.variance / self.squared_gradient if self.squared_gradient > 0 else math.inf

    def efficiency(self, num_learners: int) -> float | None:
        """Return how much a sample is worth with K learners on all devices, in (0, 1]; None while φ is not known."""
        return None if self.samples is None else efficiency(self.samples, self.batch_size, num_learners)

    def gain(self, num_learners: int) -> float:
        """Return how many rounds of one learner a round of K is worth, in [1, K]; 1 while φ is not known."""
        efficiency = self.efficiency(num_learners)
        return 1.0 if efficiency is None else num_learners * efficiency

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> NoiseScale:
        """Return what a checkpoint holds. Raises TypeError or ValueError for values that no run writes."""
        return cls(**known_fields(cls, dict(values), least=0))
