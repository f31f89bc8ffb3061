"""Draws images_per_s.png: images/s a core of every repetition of every side."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.loader.run import PILLOW
from experiments.tables.pictures import Results, bars, one, panels


def draw(results: Results) -> Figure:
    figure, found = panels(results, height=2.2, margin=1)
    for axes, (name, result) in zip(found, results.items(), strict=True):
        rows = [
            (row["name"], row["images_per_s"], row["images_per_s_repetitions"],
             "#999999" if row["name"] == PILLOW else "#0072B2")
            for row in result["rows"]
        ]  # fmt: skip
        bars(axes, rows, xlabel="images/s a core", title=f"{name}: crops of {result['size']} x {result['size']}")
    return figure


PICTURES = one("results/images_per_s.png", draw, keep=lambda result: "kind" not in result)
