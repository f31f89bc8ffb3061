"""SNOO (Kallusky et al., 2025): averaged gradients, and every τ rounds an outer step with Nesterov momentum.

It is DiLoCo's outer step around learners that stay equal, w being any of them, with outer learning rate η and outer
momentum β::

    g_j ← Σ_i g_i / K                             in every round, as by synchronous SGD
    Δ   ← z − w
    m   ← β·m + Δ
    z   ← z − η·(Δ + β·m)
    w   ← z

A single learner's is the same by `diloco` and by `snoo`; with Muon within it is MuLoCo (Thérien et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from crossbow_py.averaging.diloco import DiLoCo
from crossbow_py.averaging.rule import GradientMean
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class SNOO(DiLoCo):
    """Averaged gradients with an outer Nesterov step."""

    NAME: ClassVar[str] = "snoo"

    averaging_period: int = setting(20, "τ, rounds from one outer step to the next", minimum=1)
    restart_on_drop: bool = setting(
        False, "settle the optimizer state by restart_momentum when a step schedule drops the learning rate"
    )
    restart_momentum: Literal["reset", "keep"] = setting("reset", "optimizer state at a restart: reset or keep")
    learner_momentum: Literal["reset", "keep"] = setting("keep", "optimizer state at an outer step: reset or keep")

    @property
    def compares_gradients(self) -> bool:
        return True

    @property
    def gradient_mean(self) -> GradientMean:
        return GradientMean()
