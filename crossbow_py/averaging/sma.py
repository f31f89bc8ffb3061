"""Synchronous model averaging (Crossbow, VLDB 2019, section 3): the equations and their settings.

For every learner j of K, with gradient g_j at w_j, momentum m and weight decay λ of its own optimizer::

    u_j ← m·u_j + (g_j + λ·w_j)
    c_j ← α·(w_j − z)                      # correction, from the weights the gradient was taken at
    w_j ← w_j − γ·u_j − c_j
    z'  ← z + Σ_j c_j + μ·(z − z_prev)     # z_prev ← z; z ← z'

α is `correction_rate` (1/K by default), μ is `averaging_momentum`; K = 1 is plain SGD. As z moves by the mean of γ·u_j,
K learners consume K times the samples of one, but move it no further in a round. γ is therefore the configured rate
times √K (`rate_scaling`), which was best without a warm-up; with one, a factor of K was (experiments/averaging_rules).
Crossbow does not scale γ.

The class below says what α, μ and the period are in a round; `averaging/rule.py` computes with them, and so do the C
code and the kernels of `engine/update/`.

With a `final_correction_rate`, α goes from `correction_rate` to it as the learning rate γ falls, so that learners
explore while γ is high and come together once it is low, and z never moves further than to the learners' mean::

    α  ← final + (first − final) · ⌈16 · γ / γ_max⌉ / 16        # in steps: rounds of one α can be captured as one graph
    z' ← z + min(1, 1 / (K·α)) · Σ_j c_j + μ·(z − z_prev)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import GROUPS_AND_NODES, RATE_SCALING, PeriodicRule, RateScaling
from crossbow_py.averaging.rule import LinearRound, Stage
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting

_STEPS = 16
BEYOND_Z = "replicas would be pulled further than to the average model"
NEVER_FADES = "a step of the average model would never fade"


@dataclass(frozen=True, kw_only=True)
class SMA(PeriodicRule):
    """Synchronous model averaging around a central average model z with heavy-ball momentum."""

    NAME: ClassVar[str] = "sma"
    LACKS: ClassVar[Mapping[str, str]] = {
        "group_size": GROUPS_AND_NODES["group_size"],
        "learner_momentum": "learners continue from the average model only at a restart (restart_momentum)",
    }

    correction_rate: float | None = setting(
        None, "α, the pull of z on a replica; null is 1/K", above=0, maximum=1, why=BEYOND_Z
    )
    final_correction_rate: float | None = setting(
        None, "α at a learning rate of 0, approached as the schedule lowers it; null keeps α", above=0, maximum=1
    )
    averaging_momentum: float = setting(0.9, "μ, heavy-ball momentum of z", minimum=0, below=1, why=NEVER_FADES)
    rate_scaling: RateScaling = setting("sqrt", RATE_SCALING)
    node_period: int = setting(
        1, "H, average between nodes in every H-th averaging; in between each node is by itself", minimum=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node_period > 1 and self.quadratic_period is not None:
            raise UserError(
                "averaging.node_period counts rounds that average, which averaging.quadratic_period spaces unevenly; "
                "set one of them."
            )

    @property
    def scales_sum(self) -> bool:
        return self.final_correction_rate is not None

    def joins_nodes(self, round_index: int) -> bool:
        return self.node_period > 1 and (round_index + 1) // self.averaging_period % self.node_period == 0

    def _round(self, stage: Stage) -> LinearRound | None:
        return self._among(stage.num_learners, stage.factor)

    def _among(self, num_learners: int, factor: float, copies: float = 1.0) -> LinearRound:
        """Return the coefficients for `num_learners` different learners, each with `copies` equal replicas."""
        alpha, share = 1.0 / num_learners if self.correction_rate is None else self.correction_rate, 1.0
        if self.final_correction_rate is not None:
            alpha += (self.final_correction_rate - alpha) * (1 - math.ceil(factor * _STEPS) / _STEPS)
            share = min(1.0, 1 / (num_learners * alpha))
        return LinearRound(alpha, self.averaging_momentum, share / copies)
