"""The tables of averaging rules: those of every grid, and rules over all data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.grids import report
from experiments.grids.grid import read_grids
from experiments.grids.report import Result, Run, by_cell, difference, has_diverged
from experiments.tables.markdown import NONE, markdown_table

_OF_FOUR = ", K=4"  # in the names of a grid that has other numbers of learners too
_DATA = {
    "digits": "MLP, digits",
    "lenet": "LeNet, MNIST",
    "cifar10": "LeNet, CIFAR-10",
    "resnet8": "ResNet-8, CIFAR-10",
    "resnet32": "ResNet-32, CIFAR-10",
}
ONE = "one learner"


def differences_table(results: Mapping[str, Result]) -> str:
    """A row a rule: test accuracy of four learners less that of one at equal samples, in percentage points.

    Where runs broke, with a loss that was not finite or less than half of one learner's accuracy, it is said how many.
    """
    runs = {
        grid: {name.removesuffix(_OF_FOUR): runs for name, runs in by_cell(results[grid]).items()}
        for grid in _DATA
        if grid in results
    }
    header = ["four learners − one, percentage points", *(_header(_DATA[grid], own) for grid, own in runs.items())]
    rows = [
        [rule, *(_points(own[rule], own[ONE]) if rule in own else NONE for own in runs.values())]
        for rule in (cell.name for cell in read_grids("averaging_rules")["cifar10"].cells)
        if rule != ONE and any(rule in own for own in runs.values())
    ]
    return markdown_table(header, rows)


def at_best_rates(result: Result) -> dict[str, dict[int, tuple[str, Sequence[Run]]]]:
    """By side and number of learners, as far as all sides have it: the rate best with the first seed, and its runs."""
    found: dict[str, dict[int, tuple[str, Sequence[Run]]]] = {}
    for name, runs in by_cell(result).items():
        side, *rest = name.rsplit(", ", 2)
        if not rest:
            continue
        count, rate = int(rest[0].removeprefix("K=")), rest[1].removeprefix("rate ")
        own = found.setdefault(side, {})
        if count not in own or _first(runs) > _first(own[count][1]):
            own[count] = rate, runs
    shared = [count for count in next(iter(found.values()), {}) if all(count in own for own in found.values())]
    return {side: {count: own[count] for count in sorted(shared)} for side, own in found.items()}


def momenta_table(results: Mapping[str, Result]) -> str:
    """A row a place of momentum, a column a number of learners: test accuracy minus that of one, at the best rate."""
    result = results["momenta"]
    best, one = at_best_rates(result), by_cell(result)[ONE]
    counts = list(next(iter(best.values())))
    header = ["test accuracy − one learner, percentage points", *(f"K = {count}" for count in counts)]

    def shown(rate: str, runs: Sequence[Run]) -> str:
        return f"{_points(runs, one)} ({rate}, n = {len(runs)})"

    rows = [[side, *(shown(*own[k]) for k in counts)] for side, own in best.items()]
    return markdown_table(header, rows)


def _first(runs: Sequence[Run]) -> float:
    """The accuracy by the first seed; below all where it diverged."""
    run = min(runs, key=lambda run: run["seed"])
    return -1.0 if has_diverged(run) else float(run["summary"]["test_accuracy"])


def _header(data: str, own: Mapping[str, Sequence[Run]]) -> str:
    counts = sorted({len(runs) for runs in own.values()})
    return f"{data} (n = {'–'.join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))})"


def _points(own: Sequence[Run], one: Sequence[Run]) -> str:
    least = 0.5 * min((run["summary"]["test_accuracy"] for run in one if not has_diverged(run)), default=0.0)
    broken = sum(has_diverged(run) or run["summary"]["test_accuracy"] < least for run in own)
    if broken:
        return f"{broken} of {len(own)} broke"
    found = difference(own, one)
    if found is None:
        return NONE
    text = f"{100 * found.mean:+z.2f}"
    return text if found.half_width is None else f"{text} ± {100 * found.half_width:.2f}"


TABLES = report.TABLES
TABLES_OVER_ALL = {"differences": differences_table, "by_momentum": momenta_table}
