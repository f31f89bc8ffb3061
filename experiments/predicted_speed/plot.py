"""The picture of the prediction: images/s against learners, each as a band."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.predicted_speed.report import SIDES, cells_of
from experiments.tables.pictures import beside

_COLORS = dict(zip(SIDES, ("#0072B2", "#D55E00", "#777777"), strict=True))
_LABELS = {"fused": "fused", "streams": "streams", "plain": "one plain model, K times the batch"}


def draw(result: Mapping[str, Any]) -> Figure:
    """Rows of models, columns of precisions."""
    models, precisions = (list(dict.fromkeys(row[key] for row in result["rows"])) for key in ("model", "precision"))
    size = 1 + 3.4 * len(precisions), 0.8 + 3 * len(models)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(models), len(precisions), squeeze=False, sharex=True, sharey="row")
    for row, model in zip(grid, models, strict=True):
        for axes, precision in zip(row, precisions, strict=True):
            _panel(axes, result, model, precision)
        row[0].set_ylabel("predicted images/s")
    for axes in grid[-1]:
        axes.set_xlabel("learners K")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(SIDES) + 1, fontsize=8)
    figure.suptitle("Predicted, not measured: from slow to fast assumptions")
    return figure


def _panel(axes: Axes, result: Mapping[str, Any], model: str, precision: str) -> None:
    cells = [each for each in cells_of(result) if (each[0]["model"], each[0]["precision"]) == (model, precision)]
    first, *others = (gpu["name"] for gpu in result["gpus"])
    for side in SIDES:
        learners, low, high = _lines(cells, first, side)
        axes.fill_between(learners, low, high, color=_COLORS[side], alpha=0.25, label=f"{_LABELS[side]}, {first}")
        axes.plot(learners, low, color=_COLORS[side], linewidth=0.8)
        axes.plot(learners, high, color=_COLORS[side], linewidth=0.8)
    for other in others:
        learners, low, high = _lines(cells, other, "fused")
        axes.plot(learners, low, "--", color=_COLORS["fused"], linewidth=1.2, label=f"fused, {other}")
        axes.plot(learners, high, "--", color=_COLORS["fused"], linewidth=1.2)
    axes.set(title=f"{model}, {precision}", xscale="log", yscale="log")
    axes.set_xticks(learners, [str(count) for count in learners])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _lines(cells: list[tuple[Any, Any]], gpu: str, side: str) -> tuple[list[int], list[float], list[float]]:
    own = [(slow, fast) for slow, fast in cells if slow["gpu"] == gpu]
    learners = [slow["num_learners"] for slow, _ in own]
    slow_speeds, fast_speeds = ([pair[place][side]["images_per_s"] for pair in own] for place in range(2))
    return learners, slow_speeds, fast_speeds


PICTURES = beside(draw)
