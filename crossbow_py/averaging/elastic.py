"""Elastic averaging SGD (Zhang, Choromanska and LeCun, NeurIPS 2015), synchronous, with all learners in every round.

With correction rate α, by default the authors' β/K for β = 0.9, every τ rounds::

    w_j ← w_j − γ·u_j − α·(w_j − z)
    z'  ← z + Σ_j α·(w_j − z)

It is `crossbow` with α = 0.9/K and without momentum on z, and the learning rate is not scaled by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import BEYOND_Z, GROUPS_AND_NODES, PeriodicRule
from crossbow_py.averaging.rule import LinearRound, Stage
from crossbow_py.core.settings import setting

_BETA = 0.9


@dataclass(frozen=True, kw_only=True)
class Elastic(PeriodicRule):
    """Elastic averaging SGD: learners and z pull each other with the same force, 0.9/K."""

    NAME: ClassVar[str] = "elastic"
    LACKS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("averaging_momentum", "final_correction_rate"), "that is averaging=crossbow"),
        "learner_momentum": "learners continue from the average model only at a restart (restart_momentum)",
        **GROUPS_AND_NODES,
    }

    correction_rate: float | None = setting(
        None, f"α, the pull of z on a replica; null is {_BETA}/K", above=0, maximum=1, why=BEYOND_Z
    )

    def _round(self, stage: Stage) -> LinearRound:
        alpha = _BETA / stage.num_learners if self.correction_rate is None else self.correction_rate
        return LinearRound(correction=alpha, momentum=0.0)
