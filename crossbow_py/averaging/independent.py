"""No averaging: K models trained side by side, each evaluated and saved by itself, as in a pack of trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from crossbow_py.averaging.rule import AveragingRule, Stage
from crossbow_py.core.settings import check


@dataclass(frozen=True)
class Independent(AveragingRule):
    """Learners without a central average model: each sees every sample."""

    NAME: ClassVar[str] = "independent"
    has_central_model: ClassVar[bool] = False
    LACKS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "average_ema", "averaging_momentum", "averaging_period", "batch_norm", "correction_rate",
            "final_correction_rate", "group_size", "learner_momentum", "node_period", "pull", "quadratic_period",
            "rate_scaling", "recalibration_batches", "restart_momentum", "restart_on_drop",
        ),
        "its learners are never averaged",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)

    def round(self, stage: Stage) -> None:
        """Return None: no round averages."""
