"""Averaging rules by name. A new one is a file in this folder: a class derived from `AveragingRule`, with a `NAME`."""

import importlib
import pkgutil

from crossbow_py.averaging.independent import Independent
from crossbow_py.averaging.rule import AveragingRule, LinearRound
from crossbow_py.averaging.sma import SMA

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

RULES: dict[str, type[AveragingRule]] = {rule.NAME: rule for rule in AveragingRule.__subclasses__()}

__all__ = ["RULES", "SMA", "AveragingRule", "Independent", "LinearRound"]
