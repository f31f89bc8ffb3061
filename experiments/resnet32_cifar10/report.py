"""Tables of the accuracy runs, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.common import recorded_report
from experiments.resnet32_cifar10.run import RUNS


def summary_table(result: Mapping[str, Any]) -> str:
    """A row per seed, and their mean when there are several."""
    return recorded_report.summary_table(result, RUNS.target_accuracy)
