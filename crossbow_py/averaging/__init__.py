"""Averaging rules by name. A new rule is one file here and one entry in `RULES`."""

from crossbow_py.averaging.independent import Independent
from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.averaging.sma import SMA

RULES: dict[str, type[AveragingRule]] = {SMA.NAME: SMA, Independent.NAME: Independent}

__all__ = ["RULES", "SMA", "AveragingRule", "Independent", "LinearRound"]
