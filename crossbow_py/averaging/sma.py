"""Synchronous model averaging (Crossbow, VLDB 2019, section 3): the equations and their settings.

For every learner j of K, with gradient g_j at w_j, momentum m and weight decay λ of its own optimizer::

    u_j ← m·u_j + (g_j + λ·w_j)
    c_j ← α·(w_j − z)                      # correction, from the weights the gradient was taken at
    w_j ← w_j − γ·u_j − c_j
    z'  ← z + Σ_j c_j + μ·(z − z_prev)     # z_prev ← z; z ← z'

α is `correction_rate` (default 1/K), μ is `averaging_momentum`; K = 1 is plain SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.settings import check, setting


@dataclass(frozen=True)
class SMA(AveragingRule):
    """Synchronous model averaging around a central average model z with heavy-ball momentum."""

    NAME: ClassVar[str] = "sma"
    has_central_model: ClassVar[bool] = True

    correction_rate: float | None = setting(None, "α, the pull of z on a replica; null is 1/K", above=0, maximum=1)
    averaging_momentum: float = setting(0.9, "μ, heavy-ball momentum of z", minimum=0, below=1)
    averaging_period: int = setting(1, "τ, corrections every that many rounds", minimum=1)
    node_period: int = setting(
        1, "H, average between nodes in every H-th averaging; in between each node is by itself", minimum=1
    )
    restart_on_drop: bool = setting(True, "restart the learners from z when a step schedule drops the learning rate")
    restart_momentum: Literal["reset", "keep", "average"] = setting(
        "reset", "optimizer state at a restart: reset, keep or average over learners"
    )
    batch_norm: Literal["mean", "recalibrate"] = setting(
        "mean", "BatchNorm statistics of z: mean of the learners' or recalibrated on training batches"
    )
    recalibration_batches: int = setting(32, "batches used by batch_norm=recalibrate", minimum=1)

    def __post_init__(self) -> None:
        check(self)

    def linear_round(self, round_index: int, num_learners: int) -> LinearRound | None:
        """The coefficients of round `round_index` (from 0) for K = `num_learners` over all devices."""
        if num_learners == 1 or (round_index + 1) % self.averaging_period:
            return None
        alpha = 1.0 / num_learners if self.correction_rate is None else self.correction_rate
        return LinearRound(correction=alpha, momentum=self.averaging_momentum)
