"""Draws gains in step time by the number of models, by batch size or by width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.bench.packs.plot import ratio_lines
from experiments.bench.packs.report import Row, bases_of, grouped
from experiments.bench.packs.side import ONE_AT_A_TIME, TUNED
from experiments.pack_step_time.run import LARGER_MODELS
from experiments.tables.pictures import beside


def draw(result: Mapping[str, Any]) -> Figure:
    if result["part"] == "limits":
        return draw_limits(result["rows"])
    return draw_families(result["rows"])


def draw_families(rows: Sequence[Row]) -> Figure:
    groups, bases = grouped(_packs(rows), "model"), bases_of(rows)
    figure = Figure(figsize=(4.2 * len(groups), 3.5 * len(bases)), layout="constrained")
    panels = figure.subplots(len(bases), len(groups), squeeze=False)
    for column, ((model,), own) in enumerate(groups.items()):
        for axes, base in zip(panels[:, column], bases, strict=True):
            ratio_lines(axes, own, "num_models", base)
            axes.set(title=model, xlabel="models in the pack")
    return figure


def draw_limits(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(10, 3.6 * len(LARGER_MODELS)), layout="constrained")
    panels = figure.subplots(len(LARGER_MODELS), 2, squeeze=False)
    for line, (family, models) in zip(panels, LARGER_MODELS.items(), strict=True):
        ratio_lines(line[0], _of(rows, [family]), "batch_size", TUNED)
        line[0].set(title=family, xlabel="images in a batch")
        wider = [{**row, "width": int(row["model"].rpartition("_")[2])} for row in _of(rows, models)]
        ratio_lines(line[1], wider, "width", TUNED)
        line[1].set(title=family, xlabel="channels or units")
    return figure


def _packs(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["side"] not in ONE_AT_A_TIME]


def _of(rows: Sequence[Row], models: Sequence[str]) -> list[Row]:
    return [row for row in _packs(rows) if row["model"] in models]


PICTURES = beside(draw)
