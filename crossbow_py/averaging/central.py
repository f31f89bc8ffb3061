"""The base classes of rules with a central average model: shared settings, and when learners average."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from crossbow_py.averaging.rule import AveragingRule, LearnerMomentum, OuterStep, RoundAveraging, Stage
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import check, setting

RateScaling = Literal["none", "sqrt", "linear", "adascale"]
_LEAST_FACTOR = 1e-6  # of the largest learning rate
_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
RATE_SCALING = (
    "multiply the learning rate by 1, √K or K, for K learners on all devices, or by AdaScale's gain, from 1 to K, as "
    "measured"
)


@dataclass(frozen=True, kw_only=True)
class CentralRule(AveragingRule):
    """The base of rules that keep learners around z. With K = 1 nothing is averaged and z is w, but by outer steps.

    Running statistics, even those of a single learner, lag behind weights that move fast, so BatchNorm statistics of z
    are measured when it is evaluated or saved (experiments/batch_norm).
    """

    has_central_model: ClassVar[bool] = True

    rate_scaling: RateScaling = setting("none", RATE_SCALING)
    restart_on_drop: bool = setting(True, "restart the learners from z when a step schedule drops the learning rate")
    restart_momentum: LearnerMomentum = setting(
        "reset", "optimizer state at a restart: reset, keep or average over learners"
    )
    batch_norm: Literal["mean", "recalibrate"] = setting(
        "recalibrate", "BatchNorm statistics of z: recalibrated on training batches, or the mean of the learners'"
    )
    recalibration_batches: int = setting(8, "batches used by batch_norm=recalibrate", minimum=1)
    average_ema: float | None = setting(
        None,
        "evaluate and save an exponential moving average of z over so many epochs; null is z itself",
        above=0,
        why="it is how far back the average goes; leave it out for z itself",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.scales_by_gain and not self.compares_gradients:
            apart = "averaging.rate_scaling=adascale compares gradients, and here learners take them at places apart"
            raise UserError(f"{apart}; {self.TO_COMPARE}, or set averaging.rate_scaling=sqrt.")

    @property
    def scales_by_gain(self) -> bool:
        return self.rate_scaling == "adascale"

    def rate_scale(self, num_learners: int, gain: float = 1.0) -> float:
        return gain if self.scales_by_gain else float(num_learners ** _POWERS[self.rate_scaling])

    def round(self, stage: Stage) -> RoundAveraging | None:
        return self._round(stage) if stage.num_learners > 1 and self._averages(stage) else None

    def _averages(self, stage: Stage) -> bool:
        return True

    def _round(self, stage: Stage) -> RoundAveraging | None:
        """Return what a round that averages, with at least two learners, does; None if it averages only gradients."""
        return None


@dataclass(frozen=True, kw_only=True)
class PeriodicRule(CentralRule):
    """The base of rules that average once every so many rounds.

    With the quadratic synchronisation rule (Gu et al., ICLR 2024), learners train by themselves for longer as the
    learning rate γ falls: max(averaging_period, ⌊(quadratic_period / γ)²⌋) rounds for the γ at which they last
    averaged, and at most until the planned end of the run. γ is the rate that learners step with, after
    `rate_scaling`. During a warm-up it is what it would be without one: a warm-up begins near γ = 0, from where
    learners would never average again.
    """

    averaging_period: int = setting(1, "τ, learners average every that many rounds", minimum=1)
    quadratic_period: float | None = setting(
        None, "a, the period grows to (a / learning rate)² rounds as the rate falls; null keeps it", above=0
    )

    @property
    def needs_end(self) -> bool:
        """See AveragingRule: if z is evaluated, and not the learners' mean, they average in the last round."""
        return self.quadratic_period is not None and not self.shows_mean

    def _averages(self, stage: Stage) -> bool:
        if self.quadratic_period is None:
            return (stage.round_index + 1) % self.averaging_period == 0
        return (stage.is_last and self.needs_end) or stage.rounds_apart >= self._period(stage.first_rate)

    def _period(self, learning_rate: float) -> float:
        assert self.quadratic_period is not None, "the period is constant"
        ratio = self.quadratic_period / learning_rate if learning_rate > 0 else math.inf
        longest = ratio * ratio  # infinite on overflow, where a power would raise
        return max(self.averaging_period, math.floor(longest) if math.isfinite(longest) else math.inf)


GROUPS_AND_NODES = {
    "group_size": "gradients are not averaged; averaging=grouped_sma has groups",
    "node_period": "all learners of all nodes average together",
}


BEYOND_Z = "replicas would be pulled further than to the average model"


@dataclass(frozen=True, kw_only=True)
class PullingRule(PeriodicRule):
    """The base of rules that pull learners towards z as they step, in all nodes together or in each by itself."""

    LACKS: ClassVar[Mapping[str, str]] = {
        "group_size": GROUPS_AND_NODES["group_size"],
        "learner_momentum": "learners continue from the average model only at a restart (restart_momentum)",
    }
    TO_COMPARE: ClassVar[str] = "average in every round (averaging_period=1, node_period=1, no quadratic_period)"

    node_period: int = setting(
        1, "H, average between nodes in every H-th averaging; in between each node is by itself", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node_period > 1 and self.quadratic_period is not None:
            raise UserError("averaging.node_period and averaging.quadratic_period exclude each other; set one of them.")

    @property
    def compares_gradients(self) -> bool:
        return self.averaging_period == 1 and self.quadratic_period is None and self.node_period == 1

    def joins_nodes(self, round_index: int) -> bool:
        return self.node_period > 1 and (round_index + 1) // self.averaging_period % self.node_period == 0


@dataclass(frozen=True, kw_only=True)
class OuterRule(PeriodicRule):
    """The base of rules with outer steps, after which learners go on from z. z changes only in these steps."""

    shows_mean: ClassVar[bool] = True
    LACKS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("correction_rate", "final_correction_rate"),
            "learners train alone, then restart from the average model; nothing pulls them in between",
        ),
        "averaging_momentum": "the average model's momentum, where a rule has one, is outer_momentum or slow_momentum",
        **GROUPS_AND_NODES,
    }

    learner_momentum: LearnerMomentum = setting(
        "keep", "optimizer state at an outer step: reset, keep or average over learners"
    )

    def round(self, stage: Stage) -> RoundAveraging | None:
        """See AveragingRule. A single learner takes outer steps, too, unless they would lead to where it is.

        Where the rate is almost 0, z becomes the learners' mean and comes to rest: the velocity of earlier rates would
        still move it.
        """
        if (stage.num_learners == 1 and not self.has_velocity) or not self._averages(stage):
            return None
        if self.has_velocity and (stage.factor < _LEAST_FACTOR or stage.learning_rate <= 0):
            return OuterStep(learner_momentum=self.learner_momentum)
        return self._round(stage)
