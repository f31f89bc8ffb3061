"""Synchronous SGD: the gradients of all learners are averaged in every round, as data-parallel training does.

For every learner j of K, with gradient g_j at w_j::

    g   ← Σ_j g_j / K
    w_j ← w_j − (optimizer step for g)

All replicas stay equal, so that K learners of batch size b take the steps of one with K·b (except for BatchNorm, which
sees b samples at a time), and z is any of them. `rate_scaling=linear` with a schedule that warms up is the recipe of
Goyal et al. (2017). Gradients are clipped after averaging, and non-finite ones add nothing to the mean
(with `executor=fused` on CUDA they hold all learners back for the round).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from crossbow_py.averaging.central import CentralRule
from crossbow_py.averaging.rule import GradientMean
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class SynchronousSGD(CentralRule):
    """Gradients averaged over all learners: the large-batch baseline."""

    NAME: ClassVar[str] = "synchronous_sgd"
    LACKS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("averaging_period", "quadratic_period"), "gradients are averaged in every round, or learners would part"
        ),
        **dict.fromkeys(
            ("correction_rate", "final_correction_rate", "averaging_momentum", "pull"),
            "learners stay equal, so that nothing pulls them towards an average model",
        ),
        **dict.fromkeys(
            ("learner_momentum", "outer_learning_rate", "outer_momentum", "slow_learning_rate", "slow_momentum"),
            "there are no outer steps, as learners stay equal",
        ),
        "group_size": "all learners are in one group; averaging=grouped_sma has groups",
        "node_period": "nodes sum gradients in every round, or learners would part",
    }

    restart_on_drop: bool = setting(
        False, "settle the optimizer state by restart_momentum when a step schedule drops the learning rate"
    )
    restart_momentum: Literal["reset", "keep"] = setting("reset", "optimizer state at a restart: reset or keep")

    @property
    def compares_gradients(self) -> bool:
        return True

    @property
    def gradient_mean(self) -> GradientMean:
        return GradientMean()
