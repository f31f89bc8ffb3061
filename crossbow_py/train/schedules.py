"""Learning-rate schedules: pure functions of the samples seen, not of the batch size or the number of learners.

Settings are in epochs. A schedule multiplies the base learning rate by `factor`; a linear warm-up multiplies on top.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import Settings, check, setting

_ROUNDED = 1e-3  # relative tolerance, as runs are whole numbers of samples


def seesaw_learners(factor: float, fewest: int, most: int) -> int:
    """Return the learners of a round by Seesaw (Meterez et al., 2025): twice as many whenever the rate has halved.

    Args:
        factor: what the schedule multiplies the largest rate by, without the warm-up.
        fewest, most: the learners at the largest rate, and at the end.
    """
    doublings = math.floor(math.log2(1 / factor) + _ROUNDED) if factor > 0 else math.inf
    return min(most, fewest * 2 ** int(min(doublings, most))) if doublings > 0 else min(fewest, most)


@dataclass(frozen=True, kw_only=True)
class Schedule(Settings, ABC):
    """Base class of schedules. Frozen settings, no state.

    `samples` is the number of samples seen before the round, or of effective ones, `samples_per_epoch` the size N of
    the training set, and `total_samples` the length of the whole run, None if only accuracy, loss or time stop it.
    """

    GROUP: ClassVar[str] = "schedule"
    NAME: ClassVar[str]

    warmup_epochs: float = setting(0.0, "epochs over which the learning rate rises linearly from zero", minimum=0)

    def __post_init__(self) -> None:
        check(self)

    def factor(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        """Return the factor of the base learning rate after `samples` samples.

        Raises:
            UserError: the schedule needs the length of the run, and neither `total_samples` nor a setting gives it.
        """
        warmup_samples = self.warmup_epochs * samples_per_epoch
        # Starts one sample up the ramp: a rate of exactly zero would waste the first round.
        warmup = min(1.0, (samples + 1) / warmup_samples) if warmup_samples > 0 else 1.0
        return warmup * self._shape(samples, samples_per_epoch, total_samples)

    def warmed_up_factor(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        """Return `factor` without the warm-up."""
        factor = self._shape if self.warmup_epochs else self.factor
        return factor(samples, samples_per_epoch, total_samples)

    def drops_between(self, before: float, after: float, samples_per_epoch: int) -> bool:
        """Return whether the rate drops by a step in (before, after], in samples; averaging rules may restart then."""
        return False

    def remark(self, run_epochs: float) -> str | None:
        """Return a warning if the schedule does not fit a run of `run_epochs` epochs, with the remedy; else None."""
        if self.warmup_epochs > run_epochs:
            return (
                f"schedule.warmup_epochs={self.warmup_epochs:g} is longer than the run of {run_epochs:g} epochs: the "
                "learning rate never gets to what is set; take a shorter warm-up."
            )
        return None

    @abstractmethod
    def _shape(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        """Return the factor without warm-up."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The base learning rate throughout: factor 1."""

    NAME: ClassVar[str] = "constant"

    def _shape(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        return 1.0


class _Stepwise(Schedule):
    """Schedules that multiply the rate by `gamma` at certain sample counts: gamma ^ drops(samples)."""

    gamma: float

    @abstractmethod
    def _drops(self, samples: float, samples_per_epoch: int) -> int:
        """Return the number of drops at or before `samples`."""

    def drops_between(self, before: float, after: float, samples_per_epoch: int) -> bool:
        return self.gamma < 1 and self._drops(after, samples_per_epoch) > self._drops(before, samples_per_epoch)

    def _shape(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        return float(self.gamma ** self._drops(samples, samples_per_epoch))


@dataclass(frozen=True)
class MultiStep(_Stepwise):
    """factor = gamma ^ (milestones passed)."""

    NAME: ClassVar[str] = "multistep"

    milestones: tuple[float, ...] = setting((80.0, 120.0), "epochs after which the learning rate drops", above=0)
    gamma: float = setting(0.1, "what a drop multiplies the learning rate by", above=0, maximum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.milestones or list(self.milestones) != sorted(set(self.milestones)):
            raise UserError(
                f"schedule.milestones must be rising epochs, got {list(self.milestones)}; write them as [80,120], "
                "or use schedule=constant for none."
            )

    def _drops(self, samples: float, samples_per_epoch: int) -> int:
        return sum(_passed(samples, epochs * samples_per_epoch) > 0 for epochs in self.milestones)


@dataclass(frozen=True)
class Step(_Stepwise):
    """factor = gamma ^ floor(epochs / every_epochs)."""

    NAME: ClassVar[str] = "step"

    every_epochs: float = setting(20.0, "epochs between two drops", above=0)
    gamma: float = setting(0.5, "what a drop multiplies the learning rate by", above=0, maximum=1)

    def _drops(self, samples: float, samples_per_epoch: int) -> int:
        return _passed(samples, self.every_epochs * samples_per_epoch)


@dataclass(frozen=True)
class Cosine(Schedule):
    """factor = f + (1 - f) * (1 + cos(pi * t)) / 2, with t the share of the cycle that is over and f the final factor.

    After the cycle the factor stays at f. Loshchilov and Hutter 2017, SGDR: one cycle without restarts.
    """

    NAME: ClassVar[str] = "cosine"

    final_factor: float = setting(0.0, "share of the base learning rate left at the end", minimum=0, maximum=1)
    epochs: float | None = setting(None, "length of the cycle; null is the length of the run", above=0)

    def remark(self, run_epochs: float) -> str | None:
        """Return a warning also if the learning rate is 0 from the end of the cycle on."""
        short = self.epochs is not None and self.epochs < (1 - _ROUNDED) * run_epochs
        if short and self.final_factor == 0:
            return (
                f"schedule.epochs={self.epochs:g} is shorter than the run of {run_epochs:g} epochs: the learning rate "
                "is 0 from there on; set schedule.epochs=null for a cycle as long as the run."
            )
        return super().remark(run_epochs)

    def _shape(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        total = self.epochs * samples_per_epoch if self.epochs is not None else total_samples
        if total is None:
            raise UserError(
                "schedule=cosine needs the length of the run, got neither max_epochs, max_samples nor schedule.epochs; "
                "set one of them."
            )
        share = min(1.0, samples / total)
        return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class DefaultSchedule(Cosine):
    """That of runs without an optimizer or schedule: a cosine to 0 where the run's length is known, else constant."""

    def _shape(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        return 1.0 if total_samples is None else super()._shape(samples, samples_per_epoch, total_samples)


@dataclass(frozen=True)
class WSD(Schedule):
    """Warm-up, stable, decay: flat, then a linear fall over the last share of the run.

    factor = min(1, f + (1 - f) * (1 - t) / c), with t the share of the run that is over, f the final factor, and c the
    `cooldown`, the last share of the run (Hu et al. 2024, MiniCPM; linear as in Hägele et al. 2024).
    """

    NAME: ClassVar[str] = "wsd"

    cooldown: float = setting(
        0.2, "share of the run, at its end, over which the learning rate falls linearly", above=0, maximum=1
    )
    final_factor: float = setting(0.0, "share of the base learning rate left at the end", minimum=0, maximum=1)

    def remark(self, run_epochs: float) -> str | None:
        """Return a warning also if the cooldown begins before the warm-up is over."""
        if 0 < run_epochs * (1 - self.cooldown) < (1 - _ROUNDED) * self.warmup_epochs <= run_epochs:
            return (
                f"schedule.cooldown={self.cooldown:g} of a run of {run_epochs:g} epochs begins within the warm-up of "
                f"{self.warmup_epochs:g}: the learning rate never gets to what is set; take less of either."
            )
        return super().remark(run_epochs)

    def _shape(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        if total_samples is None:
            raise UserError(
                "schedule=wsd needs the length of the run, got neither max_epochs nor max_samples; set one of them."
            )
        left = max(0.0, 1 - samples / total_samples)
        return min(1.0, self.final_factor + (1 - self.final_factor) * left / self.cooldown)


@dataclass(frozen=True)
class Inverse(Schedule):
    """factor = (1 + gamma * epochs) ^ -power (Caffe's `inv`, counted in epochs)."""

    NAME: ClassVar[str] = "inverse"

    gamma: float = setting(0.1, "how fast the learning rate falls, per epoch", minimum=0)
    power: float = setting(0.75, "exponent of the fall", minimum=0)

    def _shape(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        return float((1 + self.gamma * samples / samples_per_epoch) ** -self.power)


@dataclass(frozen=True)
class Exponential(Schedule):
    """factor = gamma ^ epochs, continuously."""

    NAME: ClassVar[str] = "exponential"

    gamma: float = setting(0.95, "what an epoch multiplies the learning rate by", above=0, maximum=1)

    def _shape(self, samples: float, samples_per_epoch: int, total_samples: int | None) -> float:
        return float(self.gamma ** (samples / samples_per_epoch))


def _passed(samples: float, period: float) -> int:
    """Return the whole periods in `samples`, each end rounded to a whole sample: 0.7 * 10 is 7 samples."""
    return math.floor((samples + 0.5) / period)


SCHEDULES: dict[str, type[Schedule]] = {
    cls.NAME: cls for cls in (Constant, MultiStep, Step, Cosine, WSD, Inverse, Exponential)
}
