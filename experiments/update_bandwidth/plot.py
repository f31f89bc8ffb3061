"""Draws bandwidth.png: GB/s of every window of the update and of the copies."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.tables.pictures import Results, bars, one, panels
from experiments.update_bandwidth.run import label

_COLORS = {"update": "#0072B2", "copy": "#999999"}


def draw(results: Results) -> Figure:
    figure, found = panels(results, height=2.4, margin=1)
    for axes, (name, result) in zip(found, results.items(), strict=True):
        rows = [
            (label(row), row["gb_per_s"], [rate for rate in row["gb_per_s_windows"] if rate is not None],
             _COLORS[row["kind"]])
            for row in result["rows"] if row["n"]
        ]  # fmt: skip
        bars(axes, rows, xlabel="GB/s", title=f"{name}: {result['model']}, K = {result['num_learners']}")
    return figure


PICTURES = one("results/bandwidth.png", draw)
