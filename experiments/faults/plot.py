"""Draws kills.png: into which moment of a checkpoint the kills fell, and where in the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.faults.campaign import BETWEEN, PHASES
from experiments.faults.report import phases
from experiments.tables.pictures import one

_COLORS = {1: "#0072B2", 2: "#D55E00"}
_BINS = 20


def draw(result: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    columns = sorted({run["num_ranks"] for run in result["runs"]})
    for place, num_ranks in enumerate(columns):
        counted = phases(result, num_ranks)
        bars = left.barh(
            [row + (place - (len(columns) - 1) / 2) * 0.4 for row in range(len(PHASES))],
            [counted[phase] for phase in PHASES],
            height=0.38,
            color=_COLORS[num_ranks],
            label=f"{num_ranks} rank{'s' if num_ranks > 1 else ''}",
        )
        left.bar_label(bars, padding=2, fontsize="small")
    left.set_yticks(range(len(PHASES)), PHASES)
    left.invert_yaxis()
    left.set(xlabel="kills", title="when the kill fell")
    left.legend(fontsize="small")
    kills = [kill for run in result["runs"] for kill in run["kills"] if kill["whole"] is not None]
    inside = [kill["whole"] for kill in kills if kill["phase"] != BETWEEN]
    outside = [kill["whole"] for kill in kills if kill["phase"] == BETWEEN]
    right.hist(
        [inside, outside], bins=_BINS, stacked=True, color=["#009E73", "#999999"],
        label=["inside a checkpoint's writing", "between checkpoints"],
    )  # fmt: skip
    right.set(xlabel="samples of the checkpoint the next start went on from", ylabel="kills", title="where in the run")
    right.legend(fontsize="small")
    return figure


PICTURES = one(
    "results/kills.png", lambda results: draw(next(iter(results.values()))), lambda result: result["kind"] == "kill9"
)
