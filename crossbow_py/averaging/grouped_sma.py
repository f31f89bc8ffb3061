"""Grouped SMA: gradients are averaged inside groups of learners, models between the groups.

With M groups of about n = K/M learners, n ≤ `group_size`, for every learner j of group G::

    g   ← Σ_{i in G} g_i / n                         # a group stays equal, like one learner with a batch of n·b
    w_j ← w_j − (optimizer step for g) − c_j         # c_j = α·(w_j − z)
    z   ← Σ_j w_j / K                                # SMA of M learners, one a group

Synchronous SGD and SMA are its two extremes: with a single group no models are averaged, and z is any learner; with
groups of one it is `sma`. A group waits for its own learners in every round, for the others only a round late. The
learning rate is scaled for all K learners, as at both extremes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.rule import GradientMean, LinearRound, Stage
from crossbow_py.averaging.sma import SMA
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import setting


@dataclass(frozen=True, kw_only=True)
class GroupedSMA(SMA):
    """SMA between groups of learners that average their gradients."""

    NAME: ClassVar[str] = "grouped_sma"
    LACKS: ClassVar[Mapping[str, str]] = {key: why for key, why in SMA.LACKS.items() if key != "group_size"}

    group_size: int = setting(4, "learners of a device whose gradients are averaged, at most", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node_period > 1:
            rule = "averaging.node_period must be 1 where all learners of a node are one group"
            raise UserError(f"{rule}, got {self.node_period}; set averaging.node_period=1.")

    @property
    def gradient_mean(self) -> GradientMean:
        return GradientMean(self.group_size)

    def restarts(self, num_learners: int, num_devices: int) -> bool:
        """See AveragingRule: a single group does not restart, like a single learner."""
        return self.restart_on_drop and self._groups(num_learners, num_devices) > 1

    def _groups(self, num_learners: int, num_devices: int) -> int:
        return self.gradient_mean.num_groups(num_learners // num_devices, num_devices)

    def round(self, stage: Stage) -> LinearRound | None:
        """See SMA: a single group averages no models."""
        return super().round(stage) if self._groups(stage.num_learners, stage.num_devices) > 1 else None
