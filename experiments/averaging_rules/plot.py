"""Draws a picture beside every results file: accuracies of all cells; where momentum is, by number of learners."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.averaging_rules.report import ONE, at_best_rates
from experiments.grids.plot import draw_accuracies
from experiments.grids.report import Result, by_cell, summarize
from experiments.tables.pictures import beside


def draw(result: Result) -> Figure:
    return _by_learners(result) if result["grid"] == "momenta" else draw_accuracies(result)


def _by_learners(result: Result) -> Figure:
    """A line a place of momentum over the number of learners, at the best rate, with confidence intervals."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    one = summarize(ONE, by_cell(result)[ONE], []).final
    assert one is not None, "it is the yardstick"
    axes.axhline(one.mean, color="black", linestyle="--", label=ONE)
    best = at_best_rates(result)
    for place, (side, own) in enumerate(best.items()):
        finals = {count: summarize(side, runs, []).final for count, (_, runs) in own.items()}
        found = [(count, final.mean, final.half_width or 0.0) for count, final in finals.items() if final is not None]
        # Beside each other, so that intervals do not hide each other.
        places = [count * 1.02 ** (place - 2) for count, _, _ in found]
        means, widths = [mean for _, mean, _ in found], [width for *_, width in found]
        axes.errorbar(places, means, yerr=widths, marker="o", capsize=3, label=side)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := list(next(iter(best.values()))), map(str, ticks))
    axes.set(xlabel="learners of 32 samples", ylabel="test accuracy", title="LeNet on CIFAR-10 by where momentum is")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return figure


PICTURES = beside(draw)
