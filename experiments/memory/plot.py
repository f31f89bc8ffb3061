"""Draws the memory of K learners: measured as points, predicted as lines."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.memory.run import Result, rows_of
from experiments.tables.pictures import beside

# Of Okabe and Ito's palette, which the colour-blind can tell apart.
_COLOURS = {"serial": "#56B4E9", "fused": "#D55E00", "streams": "#009E73"}
_MARKERS = {"serial": "s", "fused": "D", "streams": "^"}
_MIB = 2**20


def draw(result: Result) -> Figure:
    names = [entry["model"] for entry in result["models"]]
    figure = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(names), squeeze=False).flatten(), names, strict=True):
        learners: set[int] = set()
        for executor in dict.fromkeys(row["executor"] for row in result["rows"]):
            rows = rows_of(result, model, executor)
            across = [row["num_learners"] for row in rows]
            learners |= set(across)
            colour = _COLOURS[executor]
            axes.plot(across, [row["predicted_bytes"] / _MIB for row in rows], color=colour, linewidth=1.2,
                      label=f"{executor}, predicted")  # fmt: skip
            axes.plot(across, [row["measured_bytes"] / _MIB for row in rows], _MARKERS[executor], color=colour,
                      markersize=5, label=f"{executor}, measured")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(sorted(learners), [str(value) for value in sorted(learners)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set(title=model, xlabel="learners K", ylabel="peak memory, MiB")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"peak memory of training rounds, b={result['batch_size']}, {result['precision']}, "
                    f"{result['device']}", fontsize=11)  # fmt: skip
    return figure


PICTURES = beside(draw)
