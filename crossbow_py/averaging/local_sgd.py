"""Local SGD (Stich, ICLR 2019): learners train by themselves for τ rounds, then all go on from their mean.

    z   ← Σ_j w_j / K
    w_j ← z
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import OuterRule
from crossbow_py.averaging.rule import OuterStep, Stage
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class LocalSGD(OuterRule):
    """Learners go by themselves for `averaging_period` rounds, then all go on from their mean."""

    NAME: ClassVar[str] = "local_sgd"

    averaging_period: int = setting(8, "τ, learners average every that many rounds", minimum=1)

    def _round(self, stage: Stage) -> OuterStep:
        return OuterStep(learner_momentum=self.learner_momentum)
