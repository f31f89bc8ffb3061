"""Pictures of grids: final accuracies with their confidence, and accuracy curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.grids.report import CellSummary, Result, Run, by_cell, has_diverged, mean_curve, summaries

Filled = Literal["full", "none", "left"]

_COLORS = colormaps["tab10"].colors  # type: ignore[attr-defined]
_STYLES: tuple[tuple[str, Filled], ...] = (("-", "full"), ("--", "none"), (":", "left"))
_LABEL_HEIGHT = 0.27  # inches
UNITS = {1: "samples seen", 1_000: "thousand samples seen", 1_000_000: "million samples seen"}
Style = tuple[tuple[float, ...], str, Filled]


def draw_accuracies(result: Result, curves: bool = True) -> Figure:
    """A panel of final accuracies, a row a cell, and one of accuracy against samples in the same colours."""
    rows = len(by_cell(result))
    figure = Figure(figsize=(11 if curves else 7, max(3.2, 1.3 + _LABEL_HEIGHT * rows)), layout="constrained")
    if curves:
        finals, lines = figure.subplots(1, 2)
        accuracy_lines(lines, result, "samples_seen")
        targets = ", dashed: target" if result["targets"] else ""
        lines.set_title(f"colours and points as to the left{targets}", fontsize="small", loc="right")
    else:
        finals = figure.subplots()
    accuracy_dots(finals, result)
    figure.suptitle(result["title"])
    return figure


def styles(result: Result) -> dict[str, Style]:
    """A colour, and a style of line and marker, a cell; colours begin anew with another style."""
    names = list(by_cell(result))
    count = len(_COLORS)
    return {name: (_COLORS[place % count], *_STYLES[place // count % len(_STYLES)]) for place, name in enumerate(names)}


def accuracy_dots(axes: Axes, result: Result) -> None:
    """Final accuracy of every cell: the mean with its confidence interval, and the runs as points."""
    cells, runs, style = summaries(result), by_cell(result), styles(result)
    least, most = _shown_finals(_unbroken(result["runs"]))
    axes.set_xlim(*_with_intervals(least, most, cells))
    for place, cell in enumerate(reversed(cells)):
        color, _, filled = style[cell.name]
        if cell.final is None:
            _say_at_the_edge(axes, place, "diverged")
            continue
        if cell.final.mean < least:
            _say_at_the_edge(axes, place, f"← {cell.final.mean:.4f}")
            continue
        own = [run["summary"]["test_accuracy"] for run in _healthy(runs[cell.name])]
        axes.plot(own, [place] * len(own), ".", color=color, alpha=0.4, markersize=5)
        axes.errorbar(
            cell.final.mean, place, xerr=cell.final.half_width, fmt="o", color=color, capsize=3, markersize=5,
            fillstyle=filled,
        )  # fmt: skip
        if cell.name == result["reference"]:
            axes.axvline(cell.final.mean, color="grey", linestyle="--", linewidth=1)
            axes.set_title(f"dashed: {cell.name}", fontsize="small", loc="left")
    axes.set_yticks(range(len(cells)), [cell.name for cell in reversed(cells)])
    interval = ", 95 % confidence" if any(cell.n > 1 for cell in cells) else ""
    axes.set(xlabel=f"test accuracy at the end{interval}", ylim=(-0.6, len(cells) - 0.4))
    axes.grid(alpha=0.3)


def _say_at_the_edge(axes: Axes, place: int, words: str) -> None:
    axes.annotate(f" {words}", (0, place), xycoords=("axes fraction", "data"), va="center", fontsize="small")


def accuracy_lines(axes: Axes, result: Result, key: str, legend: bool = False) -> None:
    """Mean accuracy over seeds against `samples_seen` or `elapsed_s`, a line a cell."""
    style = styles(result)
    unit = 1 if key == "elapsed_s" else unit_of(result)
    for name, runs in by_cell(result).items():
        along, accuracy = mean_curve(runs, key)
        color, line, filled = style[name]
        axes.plot(
            [x / unit for x in along], accuracy, line, color=color, marker="o", markersize=3.5, fillstyle=filled,
            linewidth=1.3, label=name,
        )  # fmt: skip
    axes.set(xlabel="seconds of training" if key == "elapsed_s" else UNITS[unit], ylabel="test accuracy")
    axes.set_ylim(*_shown_curves(_unbroken(result["runs"])))
    for target in result["targets"]:
        axes.axhline(target, color="grey", linestyle="--", linewidth=1)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize="small")


def _healthy(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if not has_diverged(run)]


def _unbroken(runs: Sequence[Run]) -> list[Run]:
    """The runs with at least half of the best accuracy: they say how far axes go."""
    healthy = _healthy(runs)
    best = max((run["summary"]["test_accuracy"] for run in healthy), default=0.0)
    return [run for run in healthy if 2 * run["summary"]["test_accuracy"] >= best]


def unit_of(result: Result) -> int:
    most = max(run["summary"]["samples_seen"] for run in result["runs"])
    return max((unit for unit in UNITS if most >= unit), default=1)


def _shown_curves(runs: Sequence[Run]) -> tuple[float, float]:
    """The range of the evaluations' accuracies, without the worst tenth, the steep beginning."""
    values = sorted(record["test_accuracy"] for run in runs for record in run["epochs"])
    return _with_margin(values[len(values) // 10], values[-1]) if values else (0.0, 1.0)


def _shown_finals(runs: Sequence[Run]) -> tuple[float, float]:
    """The range of final accuracies, without those of the worst tenth that would flatten all others."""
    values = sorted(run["summary"]["test_accuracy"] for run in runs)
    if not values:
        return (0.0, 1.0)
    tenth, high = values[len(values) // 10], values[-1]
    return _with_margin(min(value for value in values if value >= tenth - 2 * (high - tenth)), high)


def _with_intervals(least: float, most: float, cells: Sequence[CellSummary]) -> tuple[float, float]:
    """Widen a range by the intervals of the means in it, but for those wider than it: of two seeds far apart."""
    ends = [least, most]
    for cell in cells:
        if cell.final is None or cell.final.half_width is None or not least <= cell.final.mean <= most:
            continue
        if 2 * cell.final.half_width <= most - least:
            ends += [cell.final.mean - cell.final.half_width, cell.final.mean + cell.final.half_width]
    return min(ends), max(ends)


def _with_margin(low: float, high: float) -> tuple[float, float]:
    margin = max(0.1 * (high - low), 0.002)
    return low - margin, high + margin
