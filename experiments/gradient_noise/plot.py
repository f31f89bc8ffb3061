"""Draws a picture beside every results file: four statistics of learning against samples seen, a line a rule."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.gradient_noise.report import by_evaluation, mean_of, noise_scale_samples
from experiments.grids.plot import UNITS, styles, unit_of
from experiments.grids.report import Result, by_cell
from experiments.tables.pictures import beside

_NOISE = "gradient noise scale, samples"
_PANELS = {
    _NOISE: None,
    "spread of replicas": "spread",
    "agreement of learners": "agreement",
    "sharpness of the average model": "sharpness",
}
_LOGARITHMIC = (_NOISE, "spread of replicas")
_TOTAL_BATCHES = (32, 128, 512, 1024)


def draw(result: Result) -> Figure:
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for axes, (title, key) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
        _draw_statistic(axes, result, key)
        axes.set(title=title, xlabel=UNITS[unit_of(result)])
        if title in _LOGARITHMIC:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
    noise = figure.axes[0]
    for batch in _TOTAL_BATCHES:
        noise.axhline(batch, color="grey", linestyle=":", linewidth=1)
        noise.annotate(f"{batch}", (1, batch), xycoords=("axes fraction", "data"), fontsize="small", va="center")
    noise.legend(fontsize="small")
    figure.suptitle(result["title"])
    return figure


def _draw_statistic(axes: Axes, result: Result, key: str | None) -> None:
    style, unit = styles(result), unit_of(result)
    for name, runs in by_cell(result).items():
        evaluations = by_evaluation(runs)
        values = [noise_scale_samples(each) if key is None else mean_of(each, key) for each in evaluations]
        along = [each[0]["samples_seen"] / unit for each in evaluations]
        # On a logarithmic axis there is no 0: a gap, where learners are together.
        known = [(x, value or math.nan) for x, value in zip(along, values, strict=True) if value is not None]
        color, line, filled = style[name]
        axes.plot(
            [x for x, _ in known], [value for _, value in known], line, color=color, marker="o",
            markersize=3.5, fillstyle=filled, label=name,
        )  # fmt: skip


PICTURES = beside(draw)
