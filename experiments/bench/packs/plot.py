"""Lines of comparisons of packs: a colour a side, medians with the smallest and largest as whiskers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from experiments.bench.packs.report import Row, grouped
from experiments.bench.packs.side import CAPTURED, DEFAULT, DEFAULT_ENSEMBLE, SERIAL, TUNED

COLORS = {
    DEFAULT: "#999999", TUNED: "#000000", CAPTURED: "#D55E00", SERIAL: "#CC79A7",
    DEFAULT_ENSEMBLE: "#E69F00", "threads": "#009E73", "fused": "#0072B2", "fused_threads": "#56B4E9",
    "streams": "#009E73",
}  # fmt: skip


def rate_lines(axes: Axes, rows: Sequence[Row], x: str) -> None:
    """Images/s of every side against a key of its rows, both on logarithmic scales."""
    for (side,), own in grouped(rows, "side").items():
        found = [row for row in own if row["images_per_s"] is not None]
        places, rates = [row[x] for row in found], [row["images_per_s"] for row in found]
        axes.plot(places, rates, "o-", color=COLORS[side], label=side)
    axes.set(yscale="log", ylabel="images/s, summed over models")
    _finish(axes, rows, x)


def ratio_lines(axes: Axes, rows: Sequence[Row], x: str, base: str) -> None:
    """Ratios to a side of one model, of every other side."""
    for (side,), own in grouped(rows, "side").items():
        found = [row for row in own if row["over"][base] is not None]
        if not found:
            continue
        ratios = [row["over"][base] for row in found]
        whiskers = [
            [ratio["median"] - ratio["minimum"] for ratio in ratios],
            [ratio["maximum"] - ratio["median"] for ratio in ratios],
        ]
        axes.errorbar(
            [row[x] for row in found], [ratio["median"] for ratio in ratios], yerr=whiskers, fmt="o-",
            color=COLORS[side], capsize=3, label=side,
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(ylabel=f"÷ {base}", ylim=(0, None))
    _finish(axes, rows, x)


def _finish(axes: Axes, rows: Sequence[Row], x: str) -> None:
    values = sorted({row[x] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
