"""Crossbow's synchronous model averaging (Koliousis et al., VLDB 2019, section 3): the equations and their settings.

For every learner j of K, with gradient g_j at w_j, momentum m and weight decay λ of its own optimizer::

    u_j ← m·u_j + (g_j + λ·w_j)
    c_j ← α·(w_j − z)                      # correction, from the weights the gradient was taken at
    w_j ← w_j − γ·u_j − c_j
    z'  ← z + Σ_j c_j + μ·(z − z_prev)     # z_prev ← z; z ← z'

α is `correction_rate`, 0.1 as in Crossbow's public code; null is 1/K. μ is `averaging_momentum`. z is a round behind
the learners, as its step is made of weights from before theirs, and has a momentum beside theirs. That costs accuracy,
as docs/explanation/equations.md explains; `averaging=sma` has neither.

With a `final_correction_rate`, α goes from `correction_rate` to it as the learning rate γ falls, so that learners
explore while γ is high and come together once it is low, and z never moves further than to the learners' mean::

    α  ← final + (first − final) · ⌈16 · γ / γ_max⌉ / 16        # in steps: rounds of one α can be captured as one graph
    z' ← z + min(1, 1 / (K·α)) · Σ_j c_j + μ·(z − z_prev)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import BEYOND_Z, PullingRule
from crossbow_py.averaging.rule import LinearRound, Stage
from crossbow_py.core.settings import setting

_STEPS = 16
NEVER_FADES = "a step of the average model would never fade"


@dataclass(frozen=True, kw_only=True)
class Crossbow(PullingRule):
    """SMA as Crossbow has it: z moves by the sum of corrections, with heavy-ball momentum."""

    NAME: ClassVar[str] = "crossbow"

    correction_rate: float | None = setting(
        0.1, "α, the pull of z on a replica; null is 1/K", above=0, maximum=1, why=BEYOND_Z
    )
    final_correction_rate: float | None = setting(
        None, "α at a learning rate of 0, approached as the schedule lowers it; null keeps α", above=0, maximum=1
    )
    averaging_momentum: float = setting(0.9, "μ, heavy-ball momentum of z", minimum=0, below=1, why=NEVER_FADES)

    def _round(self, stage: Stage) -> LinearRound | None:
        alpha, share = 1.0 / stage.num_learners if self.correction_rate is None else self.correction_rate, 1.0
        if self.final_correction_rate is not None:
            alpha += (self.final_correction_rate - alpha) * (1 - math.ceil(stage.factor * _STEPS) / _STEPS)
            share = min(1.0, 1 / (stage.num_learners * alpha))
        return LinearRound(alpha, self.averaging_momentum, share)
