"""Synchronous SGD: the gradients of all learners are averaged in every round, as data-parallel training does.

For every learner j of K, with gradient g_j at w_j::

    g   ← Σ_j g_j / K
    w_j ← w_j − (optimizer step for g)

All replicas stay alike, so that K learners of batch size b take the steps of one with K·b (but for BatchNorm, which
sees b samples at a time), and z is any of them. `rate_scaling=linear` with a schedule that warms up is the recipe of
Goyal et al. (2017). Gradients are clipped once they are averaged. What is not finite adds nothing to the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import CentralRule
from crossbow_py.averaging.rule import GradientMean, RoundAveraging, Stage
from crossbow_py.settings import setting


@dataclass(frozen=True, kw_only=True)
class SynchronousSGD(CentralRule):
    """Gradients averaged over all learners: the large-batch baseline."""

    NAME: ClassVar[str] = "synchronous_sgd"
    LACKS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("averaging_period", "quadratic_period"), "gradients are averaged in every round, or learners would part"
        ),
        **dict.fromkeys(
            ("correction_rate", "final_correction_rate", "averaging_momentum"),
            "learners stay alike, so that nothing pulls them towards an average model",
        ),
    }

    restart_on_drop: bool = setting(False, "reset the optimizer state when a step schedule drops the learning rate")

    @property
    def gradient_mean(self) -> GradientMean:
        """See AveragingRule."""
        return GradientMean()

    def round(self, stage: Stage) -> RoundAveraging | None:
        """See AveragingRule: gradients are averaged, and nothing else has to be."""
        return None
