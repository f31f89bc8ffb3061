"""DiLoCo (Douillard et al., 2023): local SGD in which z follows the learners' mean step with Nesterov momentum.

With outer learning rate η and outer momentum β, every τ rounds::

    Δ   ← z − Σ_j w_j / K
    m   ← β·m + Δ
    z   ← z − η·(Δ + β·m)
    w_j ← z

In the terms of `OuterStep`, with d = −Δ and v = −m: v ← β·v + d; z ← z + η·d + η·β·v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import OuterRule
from crossbow_py.averaging.rule import OuterStep, Stage
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class DiLoCo(OuterRule):
    """Local SGD with an outer Nesterov step."""

    NAME: ClassVar[str] = "diloco"
    has_velocity: ClassVar[bool] = True

    averaging_period: int = setting(50, "τ, learners average every that many rounds", minimum=1)
    outer_learning_rate: float = setting(0.7, "η, what the mean step of the learners is multiplied by", above=0)
    outer_momentum: float = setting(0.9, "β, Nesterov momentum of z", minimum=0, below=1)

    def _round(self, stage: Stage) -> OuterStep:
        rate, beta = self.outer_learning_rate, self.outer_momentum
        return OuterStep(
            decay=beta, intake=1.0, along_velocity=rate * beta, along_mean=rate, pull=1.0,
            learner_momentum=self.learner_momentum,
        )  # fmt: skip
