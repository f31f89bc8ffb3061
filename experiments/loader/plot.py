"""Draws images_per_s.png: images/s a core of every repetition of every side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.loader.run import PILLOW
from experiments.tables.pictures import one

_OURS, _PILLOW = "#0072B2", "#999999"


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A panel a result: a bar up to each median, a point a repetition."""
    figure = Figure(figsize=(9, 1 + 2.2 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for axes, (name, result) in zip(panels, results.items(), strict=True):
        rows = result["rows"]
        for place, row in enumerate(rows):
            rates = row["images_per_s_repetitions"]
            axes.barh(place, row["images_per_s"], color=_PILLOW if row["name"] == PILLOW else _OURS, alpha=0.6)
            axes.plot(rates, [place] * len(rates), "k.", markersize=3, alpha=0.5)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.invert_yaxis()
        axes.set(
            xlabel="images/s a core", xlim=(0, None), title=f"{name}: crops of {result['size']} x {result['size']}"
        )
        axes.grid(alpha=0.3, axis="x")
    return figure


PICTURES = one("results/images_per_s.png", draw)
