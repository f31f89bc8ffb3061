"""Draws throughput and the number of learners by the seconds of training, with a neighbour for a while."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.auto_tuner.run import MAX_LEARNERS
from experiments.tables.pictures import beside


def draw(result: Mapping[str, Any]) -> Figure:
    seconds, rates, learners = zip(*result["throughput"], strict=True)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(seconds, rates, ".", markersize=2.5, color="lightgrey")
    above.plot(seconds, _smooth(rates), linewidth=1.4, color="#0072B2")
    above.set(ylabel="images/s", ylim=(0, None), title="LeNet, b=16: a neighbour burns one of the cores")
    below.step(seconds, learners, where="post", color="#D55E00")
    below.set(xlabel="seconds of training", ylabel="learners", yticks=range(1, MAX_LEARNERS + 1))
    for axes in (above, below):
        axes.axvspan(result["neighbour"]["begins_s"], result["neighbour"]["ends_s"], color="black", alpha=0.08)
        axes.grid(alpha=0.3)
    return figure


def _smooth(values: Sequence[float], width: int = 9) -> list[float]:
    half = width // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


PICTURES = beside(draw)
