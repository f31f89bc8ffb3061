"""Draws ranks.png: images/s of every side, windows as points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.ranks.run import NAMES
from experiments.tables.pictures import one


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A panel a result: a bar a side is the median."""
    figure = Figure(figsize=(9, 3.2 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)
    for (axes,), (name, result) in zip(panels, results.items(), strict=True):
        sides = [side for side in reversed(NAMES) if result["images_per_s"][side]]
        for place, side in enumerate(sides):
            axes.barh(place, result["images_per_s"][side]["median"], color="#56B4E9" if "ddp" in side else "#0072B2")
            windows = [rate for rate in result["images_per_s_windows"][side] if rate]
            axes.plot(windows, [place] * len(windows), ".", color="black", alpha=0.6, markersize=4)
        axes.set_yticks(range(len(sides)), [NAMES[side] for side in sides])
        axes.set(xlabel="images/s in all", title=f"{name}: {result['model']}, b = {result['batch_size']} a rank")
        axes.grid(alpha=0.3, axis="x")
    return figure


PICTURES = one("results/ranks.png", draw)
