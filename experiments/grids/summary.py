"""Sums over the runs of a grid: means over seeds with their confidence, and when a target was reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

Run = Mapping[str, Any]
Result = Mapping[str, Any]

# Quantile 0.975 of Student's t for 1, 2, ... degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.95996


@dataclass(frozen=True)
class Estimate:
    """A mean of `n` values; `half_width` is that of its 95 % confidence interval, None for a single value."""

    mean: float
    n: int
    half_width: float | None


@dataclass(frozen=True)
class Reached:
    """The time at which runs of a cell first had a target accuracy at an evaluation: means over those that had it.

    `seconds` are of training, without evaluation, over those of them that ran alone; None without any.
    """

    n: int
    epochs: float | None
    samples: float | None
    seconds: float | None


@dataclass(frozen=True)
class CellSummary:
    """A cell over its seeds. Accuracies are on the test data, of runs that did not diverge; None without any."""

    name: str
    n: int
    diverged: int
    final: Estimate | None
    best: Estimate | None
    reached: Mapping[float, Reached]


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and its 95 % confidence interval by Student's t; None of nothing."""
    if not values:
        return None
    n = len(values)
    return Estimate(mean(values), n, None if n < 2 else student_t(n - 1) * stdev(values) / math.sqrt(n))


def student_t(degrees: int) -> float:
    """Quantile 0.975 for so many degrees of freedom; beyond 30 by the first term of its expansion."""
    return _T[degrees - 1] if degrees <= len(_T) else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * degrees)


def by_cell(result: Result) -> dict[str, list[Run]]:
    """The runs of every cell, in the order of the grid."""
    found: dict[str, list[Run]] = {}
    for run in result["runs"]:
        found.setdefault(run["cell"], []).append(run)
    return found


def summaries(result: Result) -> list[CellSummary]:
    return [summarize(name, runs, result["targets"]) for name, runs in by_cell(result).items()]


def summarize(name: str, runs: Sequence[Run], targets: Sequence[float]) -> CellSummary:
    healthy = [run for run in runs if not has_diverged(run)]
    return CellSummary(
        name=name,
        n=len(runs),
        diverged=len(runs) - len(healthy),
        final=estimate([run["summary"]["test_accuracy"] for run in healthy]),
        best=estimate([run["summary"]["best_test_accuracy"] for run in healthy]),
        reached={target: reached(runs, target) for target in targets},
    )


def reached(runs: Sequence[Run], target: float) -> Reached:
    """Return when the target was reached, on average over the runs that did."""
    found = [(run, record) for run in runs if (record := first_at(run, target)) is not None]
    return Reached(
        n=len(found),
        epochs=_mean([record["epoch"] for _, record in found]),
        samples=_mean([record["samples_seen"] for _, record in found]),
        seconds=_mean([record["elapsed_s"] for run, record in found if run["alone"]]),
    )


def first_at(run: Run, target: float) -> Mapping[str, Any] | None:
    """The record of the first evaluation at or above the target; None when there is none."""
    return next((record for record in run["epochs"] if (record["test_accuracy"] or 0.0) >= target), None)


def has_diverged(run: Run) -> bool:
    return bool(run["status"] == "failed")


def difference(own: Sequence[Run], other: Sequence[Run]) -> Estimate | None:
    """The difference of final accuracies to another cell's, seed by seed, over the seeds that both finished."""
    theirs = {run["seed"]: run["summary"]["test_accuracy"] for run in other if not has_diverged(run)}
    pairs = [run for run in own if run["seed"] in theirs and not has_diverged(run)]
    return estimate([run["summary"]["test_accuracy"] - theirs[run["seed"]] for run in pairs])


def mean_curve(runs: Sequence[Run], key: str = "samples_seen") -> tuple[list[float], list[float]]:
    """Means over seeds, evaluation by evaluation, of `key` and of the test accuracy, as far as all seeds go."""
    rows = list(zip(*(run["epochs"] for run in runs if not has_diverged(run)), strict=False))
    return [mean(r[key] for r in row) for row in rows], [mean(r["test_accuracy"] for r in row) for row in rows]


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None
