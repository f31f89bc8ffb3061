"""Draws shares.png: the share of preprocessing, and the speed-up of sharing, against the number of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.preprocessing.run import LOOP, MODELBATCH, OWN, TARGET_SHARE, WORKER
from experiments.tables.pictures import one

_COLORS = {OWN: "#999999", LOOP: "#0072B2", WORKER: "#009E73"}


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 4 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 2, squeeze=False)
    for (shares, speedups), (name, result) in zip(panels, results.items(), strict=True):
        counts = sorted({row["num_models"] for row in result["rows"]})
        for side in (OWN, LOOP, WORKER):
            rows = [row for row in result["rows"] if row["side"] == side and row["n"]]
            if side == OWN:  # the same whatever their number
                rows = [{**row, "num_models": count} for row in rows for count in counts]
            _lines(shares, side, rows, "wait_share", 100)
            _lines(speedups, side, rows, "speedup", 1)
        shares.plot(
            list(MODELBATCH), [100 * share for share in MODELBATCH.values()], "k*", markersize=11,
            label="ModelBatch's figure 3, on its GPU",
        )  # fmt: skip
        shares.axhline(100 * TARGET_SHARE, color="black", linestyle=":", linewidth=1, label="to reach with 16 models")
        shares.set(ylabel="of the time, preprocessing (%)", ylim=(0, 100), title=f"{name}: waiting for data")
        speedups.set(ylabel="models · images/s ÷ own feed", ylim=(0, None), title=f"{name}: throughput")
        for axes in (shares, speedups):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_xlabel("models")
            axes.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    return figure


def _lines(axes: Axes, side: str, rows: list[dict[str, Any]], what: str, scale: float) -> None:
    rows = [row for row in rows if row[what] is not None]
    counts, middle = [row["num_models"] for row in rows], [scale * row[what]["median"] for row in rows]
    below = [scale * (row[what]["median"] - row[what]["minimum"]) for row in rows]
    above = [scale * (row[what]["maximum"] - row[what]["median"]) for row in rows]
    axes.errorbar(counts, middle, yerr=[below, above], fmt="o-", color=_COLORS[side], capsize=3, label=side)


PICTURES = one("results/shares.png", draw)
