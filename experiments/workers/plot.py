"""Draws images_per_s.png: images/s against the number of workers, a line a batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.tables.pictures import one
from experiments.workers.run import NETWORKS

_COLORS = ("#56B4E9", "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7")
_RING: dict[str, Any] = {"markersize": 13, "markerfacecolor": "none", "markeredgecolor": "black"}


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 4 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), len(NETWORKS), squeeze=False)
    for line, (name, result) in zip(panels, results.items(), strict=True):
        for axes, network in zip(line, NETWORKS, strict=True):
            for place, cell in enumerate(cell for cell in result["cells"] if cell["network"] == network):
                _cell(axes, cell, _COLORS[place % len(_COLORS)])
            axes.plot([], [], "o", **_RING, label="recommended")
            axes.set(xlabel="workers", ylabel="images/s", ylim=(0, None), title=f"{name}: {network} network")
            axes.set_xticks(result["num_workers"])
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    return figure


def _cell(axes: Axes, cell: Mapping[str, Any], color: str) -> None:
    rows = [row for row in cell["rows"] if row["n"]]
    numbers, rates = [row["num_workers"] for row in rows], [row["images_per_s"] for row in rows]
    axes.plot(numbers, rates, "-", color=color, label=f"B = {cell['batch_size']}")
    points = [(row["num_workers"], rate) for row in rows for rate in row["images_per_s_windows"] if rate is not None]
    axes.plot([number for number, _ in points], [rate for _, rate in points], ".", color=color, markersize=4, alpha=0.6)
    if cell["recommended"] in numbers:
        axes.plot(cell["recommended"], rates[numbers.index(cell["recommended"])], "o", **_RING)


PICTURES = one("results/images_per_s.png", draw)
