"""Draws losses by rate: of trials after their first rung, a panel for each batch size, and of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lora_search.run import BATCHES, RANKS
from experiments.tables.pictures import beside

_COLORS = ("#56B4E9", "#0072B2", "#00305A")  # of ranks
_ALL = "#999999"
_OF_OPTIMIZERS = {"adamw": "#0072B2", "muon": "#D55E00"}


def draw(result: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, len(BATCHES) + 1)
    if "adapters" in result:
        for axes, batch in zip(panels, BATCHES, strict=False):
            for color, rank in zip(_COLORS, RANKS, strict=True):
                _trials(axes, result["adapters"], f"rank {rank}", color, {"batch_size": batch, "model.lora.rank": rank})
            _trials(axes, result["all"], "all weights", _ALL, {"batch_size": batch})
            axes.set(title=f"batches of {batch}, after a third of an epoch", ylabel="validation loss")
    for own in result.get("optimizers", ()):
        rates, means = [each["rate"] for each in own["rates"]], [mean(each["losses"]) for each in own["rates"]]
        panels[-1].plot(rates, means, "o-", color=_OF_OPTIMIZERS[own["optimizer"]], label=own["optimizer"])
        panels[-1].set(ylim=(0.99 * min(means), 1.1 * min(means)))  # those that diverge are beyond
    panels[-1].set(title="rank 8, batches of 16, after an epoch", ylabel="test loss, mean of seeds")
    for axes in panels:
        axes.set(xscale="log", xlabel="learning rate")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    return figure


def _trials(axes: Axes, searched: Mapping[str, Any], label: str, color: str, like: Mapping[str, Any]) -> None:
    """Draw the first values of trials that have these parameters; those that failed have none."""
    found = sorted(
        (trial["params"]["optimizer.learning_rate"], next(iter(trial["values"].values())))
        for trial in searched["trials"]
        if trial["values"] and like.items() <= trial["params"].items()
    )
    axes.plot([rate for rate, _ in found], [loss for _, loss in found], "o-", color=color, label=label)


PICTURES = beside(draw)
