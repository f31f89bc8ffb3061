"""Draws a picture beside every results file: epochs, and seconds, to the target against the samples of a round."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.batch_size.report import LEARNERS, ONE, Best, best_rates
from experiments.grids.report import Result
from experiments.tables.pictures import beside

_COLORS = {ONE: "#0072B2", LEARNERS: "#E69F00"}


def draw(result: Result) -> Figure:
    best = best_rates(result)
    timed = any(each.reached.seconds is not None for each in best)
    figure = Figure(figsize=(10 if timed else 6.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    for axes, key in zip(panels, ("epochs", "seconds"), strict=False):
        for side in _COLORS:
            _draw_side(axes, side, key, best)
        _finish(axes, key, best)
    figure.suptitle(f"{result['title']}, each at the best of three rates")
    return figure


def _draw_side(axes: Axes, side: str, key: str, best: list[Best]) -> None:
    """Filled where all seeds reached the target, open where some did."""
    own = [(each, getattr(each.reached, key)) for each in best if each.side == side]
    points = [(each, value) for each, value in own if value is not None]
    color = _COLORS[side]
    axes.plot([each.total for each, _ in points], [value for _, value in points], "-", color=color, label=side)
    for each, value in points:
        face = color if each.reached.n == each.n else "white"
        axes.plot(each.total, value, "o", color=color, markerfacecolor=face)


def _finish(axes: Axes, key: str, best: list[Best]) -> None:
    totals = sorted({each.total for each in best})
    axes.set_xscale("log", base=2)
    axes.set_xticks(totals, [str(total) for total in totals])
    axes.set(xlabel="samples a round, of all learners", ylabel=f"{key} to the target")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


PICTURES = beside(draw)
