"""Draws hyperband.png: the wall time of every side, split where it is known what took it; runs as points."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.hyperband.run import names_of
from experiments.tables.pictures import one

_WHOLE = "all of it, not split"
_COLORS = {"training": "#0072B2", "measuring": "#E69F00", "rest": "#999999", _WHOLE: "#56B4E9"}


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 2.8 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)
    for (axes,), (name, result) in zip(panels, results.items(), strict=True):
        names = names_of(result)
        for place, side in enumerate(reversed(names)):
            _draw_side(axes, place, [parts(run) for run in result["runs"][side]])
        axes.set_yticks(range(len(names)), list(reversed(names.values())))
        axes.set(xlabel="seconds of wall time", title=name, xlim=(0, None))
        axes.grid(alpha=0.3, axis="x")
        axes.legend(*_legend(axes), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def parts(run: Mapping[str, Any]) -> dict[str, float]:
    """Split a run's seconds, as far as it is known what took them."""
    if "train_s" not in run:
        return {_WHOLE: run["seconds"]}
    known = {"training": run["train_s"], "measuring": run["evaluation_s"]}
    return {**known, "rest": run["seconds"] - sum(known.values())}


def _draw_side(axes: Axes, place: int, runs: list[dict[str, float]]) -> None:
    begin = 0.0
    for name in runs[0]:
        width = median(run[name] for run in runs)
        axes.barh(place, width, left=begin, color=_COLORS[name], label=name)
        begin += width
    axes.plot([sum(run.values()) for run in runs], [place] * len(runs), ".", color="black", alpha=0.6, markersize=4)


def _legend(axes: Axes) -> tuple[list[Any], list[str]]:
    shown = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [name for name in _COLORS if name in shown]
    return [shown[name] for name in names], names


PICTURES = one("results/hyperband.png", draw)
