"""SlowMo (Wang et al., ICLR 2020): local SGD with slow momentum on z, in units of the current learning rate γ.

With slow learning rate a and slow momentum β, every τ rounds::

    u   ← β·u + (z − Σ_j w_j / K) / γ
    z   ← z − a·γ·u
    w_j ← z

In the terms of `OuterStep`, v = −u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import OuterRule
from crossbow_py.averaging.rule import OuterStep, Stage
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class SlowMo(OuterRule):
    """Local SGD with slow momentum."""

    NAME: ClassVar[str] = "slowmo"
    has_velocity: ClassVar[bool] = True

    averaging_period: int = setting(12, "τ, learners average every that many rounds", minimum=1)
    slow_learning_rate: float = setting(1.0, "a, what a step of z is multiplied by", above=0)
    slow_momentum: float = setting(0.7, "β, momentum of z", minimum=0, below=1)

    def _round(self, stage: Stage) -> OuterStep:
        gamma = stage.learning_rate
        return OuterStep(
            decay=self.slow_momentum, intake=1 / gamma, along_velocity=self.slow_learning_rate * gamma, along_mean=0.0,
            pull=1.0, learner_momentum=self.learner_momentum,
        )  # fmt: skip
