"""Synchronous model averaging (SMA): learners around their mean, which is computed while they learn on.

For every learner j of K, with gradient g_j at w_j, momentum m and weight decay λ of its own optimizer::

    u_j ← m·u_j + (g_j + λ·w_j)
    c_j ← α·(w_j − z)                      # correction, from the weights the gradient was taken at
    w_j ← w_j − γ·u_j − c_j
    z   ← Σ_j w_j / K                      # beside the learning of the next round

α is `correction_rate`; K = 1 is plain SGD. z is the mean of the very weights that it pulls at, so the pulls cancel:
they bring learners together, and neither hold back nor drive their mean, which moves by the mean of γ·u_j as if
gradients were averaged. With α = 1 a replica is the mean and its own last step. Where averaged gradients have learners
wait for each other in every round, here they wait only for the average of the round before. But for z it is Crossbow's
SMA (Koliousis et al., VLDB 2019), see `crossbow.py`.

With an `averaging_period` τ > 1, z is the mean after every τ-th round, and pulls in the round after that one, when it
is still the mean of the weights that it pulls at. In between learners go by themselves.

K learners consume K times the samples of one, but move z no further in a round. γ is therefore the configured rate
times √K (`rate_scaling`), which was best without a warm-up; with one, a factor of K was (experiments/averaging_rules).

The class below says what α and the period are in a round; `averaging/rule.py` computes with them, and so do the C code
and the kernels of `engine/update/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.central import BEYOND_Z, RATE_SCALING, PullingRule, RateScaling
from crossbow_py.averaging.rule import LinearRound, Stage
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class SMA(PullingRule):
    """Synchronous model averaging: replicas are pulled to their mean."""

    NAME: ClassVar[str] = "sma"
    LACKS: ClassVar[Mapping[str, str]] = {
        **PullingRule.LACKS,
        **dict.fromkeys(
            ("averaging_momentum", "final_correction_rate"),
            "its average model is the learners' mean, and takes no steps of its own",
        ),
    }

    correction_rate: float = setting(1.0, "α, the pull of z on a replica", above=0, maximum=1, why=BEYOND_Z)
    rate_scaling: RateScaling = setting("sqrt", RATE_SCALING)

    def round(self, stage: Stage) -> LinearRound | None:
        """See AveragingRule: z moves in rounds that average, and pulls in those after them."""
        averages, pulls = self._averages(stage), stage.rounds_apart == 1
        if stage.num_learners == 1 or not (averages or pulls):
            return None
        alpha = self.correction_rate if pulls else 0.0
        return LinearRound(alpha, share=1 / stage.num_learners, follows_learners=True, moves_z=averages)
