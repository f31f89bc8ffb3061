"""Tables of what was measured of learning while learners trained by several rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from crossbow_py.core.intervals import estimate
from experiments.grids.report import Result, Run, accuracy, by_cell, has_diverged, notes
from experiments.tables.markdown import markdown_table, number

Records = Sequence[Any]
_THIRDS = ("first third", "second third", "last third")


def by_evaluation(runs: Sequence[Run]) -> list[Records]:
    """The records of every evaluation, of all runs that did not diverge, as far as all of them were measured."""
    healthy = [run["epochs"] for run in runs if not has_diverged(run)]
    return list(zip(*([record for record in own if "learning" in record] for own in healthy), strict=False))


def noise_scale_samples(records: Records) -> float | None:
    """tr(Σ) / |G|² of means of both, which is steadier than a mean of ratios; None where the noise hides G."""
    found = [record["learning"] for record in records if record["learning"]["gradient_variance"] is not None]
    norm = sum(learning["squared_gradient_norm"] for learning in found)
    return sum(learning["gradient_variance"] for learning in found) / norm if norm > 0 else None


def mean_of(records: Records, key: str) -> float | None:
    """The mean of a statistic, or of a value of the record itself; None where it was never measured."""
    values = [record[key] if key in record else record["learning"][key] for record in records]
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def statistics_table(result: Result) -> str:
    """A row a cell: the noise scale in each third of the run, what tells learners apart in its middle, where the rate
    has not come to zero yet, and the rest at its end.
    """
    header = ["", "K", *(f"noise scale, {third}" for third in _THIRDS), f"spread, {_THIRDS[1]}",
              f"agreement, {_THIRDS[1]}", "sharpness", "test accuracy", "n"]  # fmt: skip
    rows = []
    for name, runs in by_cell(result).items():
        evaluations = by_evaluation(runs)
        if not evaluations:
            continue
        scales = [noise_scale_samples([r for each in part for r in each]) for part in thirds(evaluations)]
        middle, last = [r for each in thirds(evaluations)[1] for r in each], evaluations[-1]
        rows.append([
            name, str(runs[0]["summary"]["num_learners"]), *(number(scale, ",.0f") for scale in scales),
            *(number(mean_of(middle, key), form) for key, form in (("spread", ".3g"), ("agreement", ".4f"))),
            number(mean_of(last, "sharpness"), ".3g"),
            accuracy(estimate([record["test_accuracy"] for record in last])), str(len(last)),
        ])  # fmt: skip
    return markdown_table(header, rows)


def thirds(evaluations: Sequence[Records]) -> list[Sequence[Records]]:
    """Divide the evaluations into three parts, as even as they go."""
    bounds = [round(place * len(evaluations) / len(_THIRDS)) for place in range(len(_THIRDS) + 1)]
    return [evaluations[first:end] for first, end in pairwise(bounds)]


def result_text(result: Result) -> str:
    picture = f"![{result['title']}](results/{result['grid']}.png)"
    return f"{picture}\n\n{statistics_table(result)}\n\n{notes(result)}"


TABLES = {"all": result_text}
