"""Draws a suite's results: throughput against the number of learners, and against the batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.bench.sides.side import AUTO, EXECUTOR_SIDES
from experiments.throughput.suite_report import (
    KIND,
    Result,
    Row,
    batch_sizes,
    best_row,
    main_batch_size,
    models,
    rows_of_model,
)

# Of Okabe and Ito's palette, which the colour-blind can tell apart.
_COLOURS = {
    "serial": "#56B4E9", "threads": "#0072B2", "fused": "#D55E00", "fused_threads": "#882255",
    "streams": "#009E73",
}  # fmt: skip
_MARKERS = {"serial": "s", "threads": "o", "fused": "D", "fused_threads": "X", "streams": "^"}
_BASES = {"tuned_single": ("black", "--"), "default_loop": ("dimgrey", ":")}
_AUTO: dict[str, Any] = {
    "marker": "*",
    "markersize": 15,
    "color": "#F0E442",
    "markeredgecolor": "black",
    "linestyle": "none",
    "zorder": 5,
}


def draw_by_learners(result: Result) -> Figure:
    batch_size = main_batch_size(result)
    learners = sorted({entry["num_learners"] for entry in result["rows"] if entry["side"] != AUTO})

    def panel(axes: Axes, rows: Sequence[Row]) -> None:
        rows = [row for row in rows if row["batch_size"] == batch_size and row["n"]]
        for base, (colour, style) in _BASES.items():
            for row in _of(rows, base):
                axes.axhline(row["images_per_s"], color=colour, linestyle=style, linewidth=1.3, label=base)
        for executor in EXECUTOR_SIDES:
            _line(axes, executor, "num_learners", _of(rows, executor))
        for row in _of(rows, AUTO):
            axes.plot([row["num_learners"]], [row["images_per_s"]], label="auto", **_AUTO)
        axes.set_xlabel("learners on the device, K")
        _powers(axes, learners)

    title = f"training throughput against the number of learners, b = {batch_size} images a learner"
    return _figure(result, panel, title)


def draw_by_batch_size(result: Result) -> Figure:
    def panel(axes: Axes, rows: Sequence[Row]) -> None:
        for base, (colour, style) in _BASES.items():
            measured = [row for row in _of(rows, base) if row["n"]]
            axes.plot(
                *_points("batch_size", measured), color=colour, linestyle=style, linewidth=1.3, marker=".", label=base
            )
        line = 0
        for executor in EXECUTOR_SIDES:
            best = [best_row(rows, batch_size=b, sides=[executor]) for b in batch_sizes(result)]
            measured = [row for row in best if row is not None]
            _line(axes, executor, "batch_size", measured)
            for row in measured:
                axes.annotate(
                    f"{executor} K={row['num_learners']}", (row["batch_size"], 0), (0, -21 - 10 * line),
                    xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", va="top", fontsize=8,
                    color=_COLOURS[executor],
                )  # fmt: skip
            line += bool(measured)
        axes.set_xlabel("batch size of a learner b, images", labelpad=4 + 10 * line)
        _powers(axes, batch_sizes(result))

    return _figure(result, panel, "training throughput against the batch size, each executor with its fastest K")


def _figure(result: Result, panel: Callable[[Axes, Sequence[Row]], None], title: str) -> Figure:
    names = models(result)
    columns = min(2, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(max(7.0, 5.2 * columns), 3.8 * lines + 0.9), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, model in zip(panels, names, strict=False):
        panel(axes, rows_of_model(result, model))
        axes.set(title=f"{model}, {result['data'][model]}", ylabel="throughput, images/s")
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(alpha=0.3)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    by_label = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        by_label.values(), by_label.keys(), loc="outside lower center", ncols=6 if columns > 1 else 3, frameon=False
    )
    facts = result["machine"]
    device = ", ".join(facts["gpus"]) if result["device"] == "cuda" else f"{facts['cpu']}, {facts['cores']} cores"
    figure.suptitle(f"{title}\n{device}, {result['precision']} (default_loop fp32)", fontsize=11)
    return figure


def _of(rows: Sequence[Row], side: str) -> list[Row]:
    return [row for row in rows if row["side"] == side]


def _points(key: str, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    rows = sorted(rows, key=lambda row: int(row[key]))
    return [row[key] for row in rows], [row["images_per_s"] for row in rows]


def _line(axes: Axes, executor: str, key: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: int(row[key]))
    across, rates = _points(key, rows)
    windows = [[value for value in row["images_per_s_windows"] if value is not None] for row in rows]
    spread = [[rate - min(seen), max(seen) - rate] for rate, seen in zip(rates, windows, strict=True)]
    colour, marker = _COLOURS[executor], _MARKERS[executor]
    axes.errorbar(
        across, rates, [list(ends) for ends in zip(*spread, strict=True)], color=colour, marker=marker, markersize=5,
        linewidth=1.6, elinewidth=1, capsize=2, label=executor,
    )  # fmt: skip


def _powers(axes: Axes, values: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(values[0] / 1.3, values[-1] * 1.3)
    axes.set_xticks(values, [str(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())


def _pictures(results: Mapping[str, Result]) -> dict[str, Figure]:
    suites = {name: result for name, result in results.items() if result.get("kind") == KIND}
    by_learners = {f"results/{name}_by_learners.png": draw_by_learners(result) for name, result in suites.items()}
    by_batch_size = {f"results/{name}_by_batch_size.png": draw_by_batch_size(result) for name, result in suites.items()}
    return {**by_learners, **by_batch_size}


PICTURES = _pictures
