"""Draws gpus.png: efficiency and exposed averaging against the number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from experiments.scaling.inputs import HIDDEN_SHARE
from experiments.tables.pictures import beside

# Of each model the workload that is most like how it would be run.
PANELS = ("ResNet-32 b=16 K=4", "VGG-16 b=16 K=2", "ResNet-50 b=16 K=2")
_COLORS = ("#0072B2", "#D55E00")
_STYLES: dict[str, Any] = {"τ=1": "-", "H": "--", "τ": "-.", "synchronous": ":"}
_RING: dict[str, Any] = {"markersize": 11, "markerfacecolor": "none", "markeredgecolor": "black"}


def draw(result: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(13, 7.4), layout="constrained")
    panels = figure.subplots(2, len(PANELS), sharex=True, sharey="row")
    networks = [network["name"] for network in result["inputs"]["networks"]]
    for column, workload in enumerate(PANELS):
        above, below = panels[0][column], panels[1][column]
        for color, network in zip(_COLORS, networks, strict=True):
            scene = next(
                scene for scene in result["scenes"] if (scene["workload"], scene["network"]) == (workload, network)
            )
            _scene(above, below, scene, result["gpu_counts"], color)
        _dress(above, below, workload, result["gpu_counts"])
    panels[0][0].set_ylabel("images/s ÷ (GPUs × images/s of one)")
    panels[1][0].set_ylabel("exposed share of a round")
    figure.legend(handles=_handles(networks), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Simulated: SMA averages in every round (τ = 1), between nodes every H-th, or every τ-th round")
    return figure


def _scene(above: Axes, below: Axes, scene: Mapping[str, Any], counts: list[int], color: str) -> None:
    for name, curve in scene["curves"].items():
        kind = name if name in _STYLES else name.partition("=")[0]
        style = {"color": color, "linestyle": _STYLES[kind], "linewidth": 1.2 if kind == "synchronous" else 1.9}
        above.plot(counts, curve["efficiency"], **style)
        below.plot(counts, curve["exposed"], **style)
        if kind in ("τ", "H"):
            # Both periods lead to much the same place: one label above the other.
            above.annotate(name, (counts[-1], curve["efficiency"][-1]), xytext=(2, 4 if kind == "τ" else -12),
                           textcoords="offset points", fontsize=8, color=color, annotation_clip=False)  # fmt: skip
    if scene["exposed_from"] is not None:
        place = counts.index(scene["exposed_from"])
        below.plot(counts[place], scene["curves"]["τ=1"]["exposed"][place], "o", **_RING)


def _dress(above: Axes, below: Axes, title: str, counts: list[int]) -> None:
    above.set(title=title, ylim=(0, 1.1))
    below.set(xlabel="GPUs, 8 a node", xscale="log", ylim=(-0.02, 1))
    below.set_xticks(counts, [str(count) for count in counts], fontsize=8)
    below.minorticks_off()
    below.axhline(HIDDEN_SHARE, color="black", linewidth=0.8, linestyle=(0, (1, 3)))
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.axvline(8, color="black", linewidth=0.6, alpha=0.4)


def _handles(networks: list[str]) -> list[Line2D]:
    colors = [Line2D([], [], color=color, label=network) for color, network in zip(_COLORS, networks, strict=True)]
    labels = {
        "τ=1": "SMA, τ = 1",
        "H": f"SMA, shortest H with ≤ {HIDDEN_SHARE:.0%} exposed",
        "τ": f"SMA, shortest τ with ≤ {HIDDEN_SHARE:.0%} exposed",
        "synchronous": "synchronous data parallel",
    }
    styles = [Line2D([], [], color="#444444", linestyle=_STYLES[key], label=label) for key, label in labels.items()]
    ring = Line2D([], [], linestyle="", marker="o", **_RING, label=f"τ = 1 is first over {HIDDEN_SHARE:.0%}")
    return [*colors, *styles, ring]


PICTURES = beside(draw)
