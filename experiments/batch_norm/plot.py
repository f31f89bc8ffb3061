"""Draws a picture beside every results file: accuracy against samples with every kind of statistics, a panel a cell."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.batch_norm.report import curve, healthy
from experiments.batch_norm.variants import VARIANTS
from experiments.grids.plot import UNITS, unit_of
from experiments.grids.report import Result, Run
from experiments.tables.pictures import beside

_MOST_IN_A_ROW = 4
_STYLES = (("#000000", "-"), ("#E69F00", "--"), ("#56B4E9", "-."), ("#0072B2", ":"))


def draw(result: Result) -> Figure:
    found, unit = healthy(result), unit_of(result)
    columns = max(1, min(_MOST_IN_A_ROW, len(found)))
    rows = max(1, -(-len(found) // columns))
    figure = Figure(figsize=(1 + 3.2 * columns, 0.4 + 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in panels.flat[max(1, len(found)) :]:
        axes.remove()
    for axes, (name, runs) in zip(panels.flat, found.items(), strict=False):
        _draw_cell(axes, runs, unit)
        axes.set(title=name, xlabel=UNITS[unit])
        axes.grid(alpha=0.3)
    for row in panels:
        row[0].set_ylabel("test accuracy")
    if found:
        panels[0, 0].legend(fontsize="small")
    figure.suptitle(result["title"])
    return figure


def _draw_cell(axes: Axes, runs: list[Run], unit: int) -> None:
    for (color, line), variant in zip(_STYLES, VARIANTS, strict=True):
        rows = list(zip(*(curve(run, variant) for run in runs), strict=False))
        samples = [line["samples_seen"] / unit for line in runs[0]["measured"]][: len(rows)]
        axes.plot(samples, [sum(row) / len(row) for row in rows], line, color=color, label=variant)
        for seen, row in zip(samples, rows, strict=True):
            axes.plot([seen] * len(row), row, ".", color=color, alpha=0.4, markersize=4)


PICTURES = beside(draw)
