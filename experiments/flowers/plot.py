"""Draws curve.png: test accuracy and training loss, against samples seen and epochs."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.flowers.run import TARGET
from experiments.tables.pictures import Results, one

_CHANCE = 0.2  # five classes of equally many photographs
_THOUSAND = 1_000


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    runs = [(name, run) for name, result in results.items() for run in result["runs"]]
    for name, run in runs:
        summary, samples = run["summary"], [record["samples_seen"] / _THOUSAND for record in run["epochs"]]
        label = f"{name}, K={summary['num_learners']} b={summary['batch_size']} seed {summary['seed']}"
        for axes, key in ((accuracy, "test_accuracy"), (loss, "train_loss")):
            axes.plot(samples, [record[key] for record in run["epochs"]], linewidth=1.4, label=label)
    accuracy.axhline(TARGET, color="grey", linestyle="--", linewidth=1, label=f"target {TARGET}")
    accuracy.axhline(_CHANCE, color="grey", linestyle=":", linewidth=1, label=f"chance {_CHANCE}")
    accuracy.set(title="test accuracy of the average model", ylim=(0.0, 1.0))
    loss.set(title="training loss of the learners", yscale="log")
    first = runs[0][1]["summary"]
    for axes in (accuracy, loss):
        _finish(axes, first["samples_seen"] / first["epochs"] / _THOUSAND)
    return figure


def _finish(axes: Axes, thousands_an_epoch: float) -> None:
    axes.set_xlabel("thousand samples seen")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    epochs = axes.secondary_xaxis(
        "top",
        functions=(
            lambda samples: np.asarray(samples, float) / thousands_an_epoch,
            lambda epochs: np.asarray(epochs, float) * thousands_an_epoch,
        ),
    )
    epochs.set_xlabel("epochs")


PICTURES = one("curve.png", draw)
