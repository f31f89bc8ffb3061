"""Draws cost.png: seconds of training a checkpoint costs, written beside it and with training standing still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.tables.pictures import one


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 0.8 + 1.6 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for axes, (name, result) in zip(panels, results.items(), strict=True):
        found = {figure_name: spread[0] for figure_name, spread in result["figures"].items()}
        axes.barh(0, found["snapshot_s"], color="#D55E00", label="copy, training stands still")
        axes.barh(0, found["slowed_s"], left=found["snapshot_s"], color="#0072B2", label="write, training is slower")
        axes.barh(1, found["still_s"], color="#999999", label="copy and write, training stands still")
        for place, key in enumerate(("beside_s", "still_s")):
            values = [each[key] for each in result["repetitions"]]
            axes.plot(values, [place] * len(values), "k.", markersize=3, alpha=0.5)
        axes.set_yticks([0, 1], ["beside training", "training waits"])
        axes.invert_yaxis()
        axes.set(xlabel="seconds of training lost a checkpoint", xlim=(0, None), title=f"{name}: {result['gb']:.2f} GB")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3, axis="x")
    return figure


PICTURES = one("results/cost.png", draw, keep=lambda result: bool(result["n"]))
