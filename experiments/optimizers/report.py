"""The tables of optimizers: those of every grid, and accuracies by the number of learners."""

from __future__ import annotations

from experiments.grids import report
from experiments.tables.markdown import NONE, markdown_table

GRADIENTS = "averaged gradients"


def parts_of(cell: str) -> tuple[str, str]:
    """The optimizer and the averaging rule of a cell, by its name."""
    optimizer, _, *rule = cell.split(", ")
    return optimizer, rule[0] if rule else GRADIENTS


def by_learners(result: report.Result) -> str:
    """Mean test accuracy by optimizer, in a column for every number of learners that average gradients."""
    found: dict[str, dict[int, float | None]] = {}
    for name, runs in report.by_cell(result).items():
        (optimizer, rule), final = parts_of(name), report.summarize(name, runs, ()).final
        if rule == GRADIENTS:
            mean = None if final is None else final.mean
            found.setdefault(optimizer, {})[runs[0]["summary"]["num_learners"]] = mean
    numbers = sorted({number for own in found.values() for number in own})
    rows = [[name, *(percent(own.get(number)) for number in numbers)] for name, own in found.items()]
    return markdown_table(["test accuracy, learners", *map(str, numbers)], rows)


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


TABLES = {**report.TABLES, "by_learners": by_learners}
