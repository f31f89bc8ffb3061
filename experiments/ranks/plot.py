"""Draws ranks.png: images/s of every side, windows as points."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.ranks.run import NAMES
from experiments.tables.pictures import Results, bars, one, panels


def draw(results: Results) -> Figure:
    figure, found = panels(results, height=3.2)
    for axes, (name, result) in zip(found, results.items(), strict=True):
        rates, windows = result["images_per_s"], result["images_per_s_windows"]
        rows = [
            (label, rates[side]["median"], [rate for rate in windows[side] if rate],
             "#56B4E9" if "ddp" in side else "#0072B2")
            for side, label in NAMES.items() if rates[side]
        ]  # fmt: skip
        title = f"{name}: {result['model']}, b = {result['batch_size']} a rank"
        bars(axes, rows, xlabel="images/s in all", title=title)
    return figure


PICTURES = one("results/ranks.png", draw, keep=lambda result: "kind" not in result)
