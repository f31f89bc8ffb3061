"""Averaging rules by name. To add one, add a file with a subclass of `AveragingRule` that has a `NAME`."""

import importlib
import pkgutil

from crossbow_py.averaging.central import CentralRule, PeriodicRule, PullingRule
from crossbow_py.averaging.crossbow import Crossbow
from crossbow_py.averaging.diloco import DiLoCo
from crossbow_py.averaging.elastic import Elastic
from crossbow_py.averaging.grouped_sma import GroupedSMA
from crossbow_py.averaging.independent import Independent
from crossbow_py.averaging.local_sgd import LocalSGD
from crossbow_py.averaging.papa import PAPA
from crossbow_py.averaging.rule import AveragingRule, GradientMean, LinearRound, OuterStep, RoundAveraging, Stage
from crossbow_py.averaging.slowmo import SlowMo
from crossbow_py.averaging.sma import SMA
from crossbow_py.averaging.snoo import SNOO
from crossbow_py.averaging.synchronous_sgd import SynchronousSGD

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def _rules(base: type[AveragingRule]) -> list[type[AveragingRule]]:
    """Return a class and its subclasses, as far as they define a `NAME`."""
    derived = [rule for each in base.__subclasses__() for rule in _rules(each)]
    return [base, *derived] if "NAME" in vars(base) else derived


RULES: dict[str, type[AveragingRule]] = {rule.NAME: rule for rule in _rules(AveragingRule)}  # type: ignore[type-abstract]

__all__ = [
    "PAPA",
    "RULES",
    "SMA",
    "SNOO",
    "AveragingRule",
    "CentralRule",
    "Crossbow",
    "DiLoCo",
    "Elastic",
    "GradientMean",
    "GroupedSMA",
    "Independent",
    "LinearRound",
    "LocalSGD",
    "OuterStep",
    "PeriodicRule",
    "PullingRule",
    "RoundAveraging",
    "SlowMo",
    "Stage",
    "SynchronousSGD",
]
