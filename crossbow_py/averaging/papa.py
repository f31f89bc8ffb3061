"""PAPA (Jolicoeur-Martineau et al., 2023): a population of models, each pulled a little towards the mean of all.

With pull a, every τ rounds and in proportion to the learning rate γ, γ_0 being its largest::

    z   ← Σ_j w_j / K
    w_j ← w_j + a·(γ/γ_0)·(z − w_j)

Replicas stay apart, so that they learn different things; their mean is evaluated and saved. They also stay apart when
a step schedule drops the learning rate, unless `restart_on_drop` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import GROUPS_AND_NODES, PeriodicRule
from crossbow_py.averaging.rule import OuterStep, Stage
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class PAPA(PeriodicRule):
    """PAPA: replicas stay apart, each pulled a little towards the mean of all."""

    NAME: ClassVar[str] = "papa"
    shows_mean: ClassVar[bool] = True
    LACKS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("correction_rate", "final_correction_rate"), "its pull towards the mean is averaging.pull"),
        "averaging_momentum": "its average model is the learners' mean, and has no momentum",
        "learner_momentum": "learners are pulled a little, and keep their optimizer state",
        **GROUPS_AND_NODES,
    }

    averaging_period: int = setting(10, "τ, learners average every that many rounds", minimum=1)
    restart_on_drop: bool = setting(False, "restart the learners from z when a step schedule drops the learning rate")
    pull: float = setting(0.01, "a, how far a replica goes towards the mean at the largest rate", above=0, maximum=1)

    def _round(self, stage: Stage) -> OuterStep:
        return OuterStep(pull=self.pull * stage.factor)
