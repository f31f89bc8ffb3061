"""Draws bandwidth.png: GB/s of every window of the update and of the copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.tables.pictures import one
from experiments.update_bandwidth.run import label

_COLORS = {"update": "#0072B2", "copy": "#999999"}


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A panel a result: a bar up to each median, a point a window."""
    figure = Figure(figsize=(9, 1 + 2.4 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for axes, (name, result) in zip(panels, results.items(), strict=True):
        rows = [row for row in result["rows"] if row["n"]]
        for place, row in enumerate(rows):
            windows = [rate for rate in row["gb_per_s_windows"] if rate is not None]
            axes.barh(place, row["gb_per_s"], color=_COLORS[row["kind"]], alpha=0.6)
            axes.plot(windows, [place] * len(windows), "k.", markersize=3, alpha=0.5)
        axes.set_yticks(range(len(rows)), [label(row) for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel="GB/s", xlim=(0, None), title=f"{name}: {result['model']}, K = {result['num_learners']}")
        axes.grid(alpha=0.3, axis="x")
    return figure


PICTURES = one("results/bandwidth.png", draw)
