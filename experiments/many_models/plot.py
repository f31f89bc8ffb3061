"""Draws models_a_minute.png: how many models a minute are trained, against how many at once, by every side."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.many_models.run import CORES, COUNTED, COUNTS, FUNC, JAX, PLAIN, rates_by_count
from experiments.tables.pictures import one

_LINES = {
    "many": ("crossbow_py", "#0072B2", "-"),
    JAX: ("JAX, vmap", "#D55E00", "-"),
    FUNC: ("torch.func, vmap", "#009E73", "-"),
    CORES: ("a process a core", "#666666", "--"),
    PLAIN: ("one after another", "#666666", ":"),
}


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    (result,) = results.values()
    tasks = list(dict.fromkeys(run["task"] for run in result["runs"]))
    figure = Figure(figsize=(3.6 * len(tasks), 3.4), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, task in zip(panels, tasks, strict=True):
        for side, (label, color, style) in _LINES.items():
            _draw(axes, rates_by_count(result["runs"], task, side), label, color, style)
        counts = sorted({run["count"] for run in result["runs"]} - {0})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, list(map(str, counts)))
        axes.set(title=COUNTED[task], xlabel="K, models side by side", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("models a minute")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_LINES))
    return figure


def _draw(axes: Axes, rates: Mapping[int, list[float]], label: str, color: str, style: str) -> None:
    """Draw a line with the runs as points, or, where the number of models does not matter, a level."""
    if 0 in rates:
        axes.axhline(median(rates[0]), color=color, linestyle=style, label=label)
        return
    counts = sorted(rates)
    axes.plot(counts, [median(rates[k]) for k in counts], style, marker="o", markersize=3, color=color, label=label)
    for k in counts:
        axes.plot([k] * len(rates[k]), rates[k], ".", color=color, alpha=0.4, markersize=3)


PICTURES = one("results/models_a_minute.png", draw, lambda result: result.get("kind") == COUNTS)
