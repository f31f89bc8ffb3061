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
    for place, (side, own) in enumerate(at_best_rates(result).items()):
        found = [summarize(side, runs, []).final for _, runs in own.values()]
        shifted = [count * 1.02 ** (place - 2) for count in own]  # so that intervals do not hide each other
        means, widths = zip(*((each.mean, each.half_width or 0.0) for each in found if each is not None), strict=True)
        axes.errorbar(shifted, means, yerr=widths, marker="o", capsize=3, label=side)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := list(own), map(str, ticks))
    axes.set(xlabel="learners of 32 samples", ylabel="test accuracy", title="LeNet on CIFAR-10 by where momentum is")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return figure


PICTURES = beside(draw)
