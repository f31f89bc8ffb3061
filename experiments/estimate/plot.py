"""Draws memory against the batch size: predicted as lines, what rounds really held as points."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.estimate.run import Result, cells_of
from experiments.tables.pictures import beside

# Of Okabe and Ito's palette, which the colour-blind can tell apart.
_COLOURS = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2")
_COLUMNS = 4
_GIB = 2**30


def draw(result: Result) -> Figure:
    names = [entry["model"] for entry in result["models"]]
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(3.6 * columns, 3.2 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, model in zip(panels, names, strict=False):
        _draw_model(axes, result, model)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    figure.suptitle("memory of K learners at once, fp32: predicted (lines) and held (points)", fontsize=11)
    return figure


def _draw_model(axes: Axes, result: Result, model: str) -> None:
    cells = [cell for cell in cells_of(result, model) if cell["true"] and cell["at_once"] == cell["num_learners"]]
    for colour, learners in zip(_COLOURS, sorted({cell["num_learners"] for cell in cells}), strict=False):
        own = sorted((cell for cell in cells if cell["num_learners"] == learners), key=lambda cell: int(cell["true"]))
        across = [cell["true"] for cell in own]
        axes.plot(across, [cell["predicted_bytes"] / _GIB for cell in own], color=colour, linewidth=1.2,
                  label=f"K={learners}, predicted")  # fmt: skip
        axes.plot(across, [cell["true_bytes"] / _GIB for cell in own], "o", color=colour, markersize=4,
                  label=f"K={learners}, held")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set(title=model, xlabel="batch size", ylabel="GiB")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=7)


PICTURES = beside(draw)
