"""Draws a picture beside every results file: accuracy against the number of learners, a line an optimizer and rule."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.grids.report import Result, by_cell, summarize
from experiments.optimizers.report import parts_of
from experiments.tables.pictures import beside

_COLORS, _MARKERS = {"SGD": "tab:blue", "Muon": "tab:orange"}, "os^D"


def draw(result: Result) -> Figure:
    """One line an optimizer and rule, with 95 % confidence intervals; batches along the top."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    (batch,) = {run["summary"]["batch_size"] for run in result["runs"]}
    for name, runs in by_cell(result).items():
        found = summarize(name, runs, ()).final
        if found is not None:
            point = runs[0]["summary"]["num_learners"], 100 * found.mean, 100 * (found.half_width or 0)
            lines.setdefault(parts_of(name), []).append(point)
    rules = list(dict.fromkeys(rule for _, rule in lines))
    for (optimizer, rule), points in lines.items():
        numbers, means, widths = zip(*sorted(points), strict=True)
        place = rules.index(rule)
        axes.errorbar(
            numbers, means, widths, color=_COLORS[optimizer], marker=_MARKERS[place % len(_MARKERS)], capsize=3,
            linestyle="-" if place == 0 else ":", label=f"{optimizer}, {rule}",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = sorted({number for points in lines.values() for number, _, _ in points})
    axes.set_xticks(ticks, [f"{number}\n{batch * number}" for number in ticks])
    axes.set_xlabel(f"learners of {batch} samples, and samples a round")
    axes.set_ylabel("test accuracy, %")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.suptitle(result["title"])
    return figure


PICTURES = beside(draw)
