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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from crossbow_py.averaging.diloco import DiLoCo
from crossbow_py.averaging.synchronous_sgd import SynchronousSGD
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class SNOO(SynchronousSGD, DiLoCo):
    """Averaged gradients with an outer Nesterov step."""

    NAME: ClassVar[str] = "snoo"
    LACKS: ClassVar[Mapping[str, str]] = DiLoCo.LACKS

    averaging_period: int = setting(20, "τ, rounds from one outer step to the next", minimum=1)
    learner_momentum: Literal["reset", "keep"] = setting("keep", "optimizer state at an outer step: reset or keep")
