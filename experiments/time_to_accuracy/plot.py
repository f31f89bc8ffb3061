"""Draws a picture beside every results file: seconds to the targets by every side, and accuracy against seconds."""

from __future__ import annotations

from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.grids.plot import accuracy_lines, styles
from experiments.grids.report import Result
from experiments.tables.pictures import beside
from experiments.time_to_accuracy.report import times_of


def draw(result: Result) -> Figure:
    targets = result["targets"]
    figure = Figure(figsize=(6 + 4 * len(targets), 3.6), layout="constrained")
    panels = figure.subplots(1, 1 + len(targets))
    for place, (axes, target) in enumerate(zip(panels, targets, strict=False)):
        _bars(axes, result, target, named=place == 0)
    accuracy_lines(panels[-1], result, "elapsed_s")
    figure.suptitle(result["title"])
    return figure


def _bars(axes: Axes, result: Result, target: float, named: bool) -> None:
    """The median of a side's seconds as a bar, its runs as points."""
    times, style = times_of(result, target), styles(result)
    for place, (name, own) in enumerate(reversed(times.items())):
        seconds = list(own.values())
        if not seconds:
            axes.annotate(" not reached", (0, place), va="center", fontsize="small")
            continue
        axes.barh(place, median(seconds), color=style[name][0], alpha=0.8)
        axes.plot(seconds, [place] * len(seconds), ".", color="black", alpha=0.6, markersize=4)
    axes.set_yticks(range(len(times)), list(reversed(times)) if named else [""] * len(times))
    axes.set(xlabel=f"seconds of training to {target}", xlim=(0, None), ylim=(-0.6, len(times) - 0.4))
    axes.grid(alpha=0.3, axis="x")


PICTURES = beside(draw)
