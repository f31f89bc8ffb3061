"""Draws a picture beside every results file: what packs gain by batch size, by the models in a pack, or by width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from experiments.bench.packs.plot import rate_lines, ratio_lines
from experiments.bench.packs.report import Row, bases_of, grouped
from experiments.bench.packs.side import ONE_AT_A_TIME, TUNED
from experiments.model_batch.run import LIMITS, title_of
from experiments.tables.pictures import beside


def draw(result: Mapping[str, Any]) -> Figure:
    rows = result["rows"]
    packs = [row for row in rows if row["side"] not in ONE_AT_A_TIME]
    if len({row["num_models"] for row in packs}) > 1:
        figure = _by_number(packs, bases_of(rows))
    elif len({row["model"] for row in packs}) > 1:
        figure = _by_size_and_width(packs)
    else:
        figure = _by_size(rows, bases_of(rows))
    figure.suptitle(f"{title_of(result)} ({result['device']})")
    return figure


def _by_size(rows: Sequence[Row], bases: Sequence[str]) -> Figure:
    figure = Figure(figsize=(5 * (1 + len(bases)), 4.2), layout="constrained")
    panels = figure.subplots(1, 1 + len(bases))
    rate_lines(panels[0], rows, "batch_size")
    for axes, base in zip(panels[1:], bases, strict=True):
        ratio_lines(axes, rows, "batch_size", base)
    for axes in panels:
        axes.set_xlabel("images in a batch")
    return figure


def _by_number(packs: Sequence[Row], bases: Sequence[str]) -> Figure:
    groups = grouped(packs, "model")
    figure = Figure(figsize=(4.2 * len(groups), 3.5 * len(bases)), layout="constrained")
    panels = figure.subplots(len(bases), len(groups), squeeze=False)
    for column, ((model,), own) in enumerate(groups.items()):
        for axes, base in zip(panels[:, column], bases, strict=True):
            ratio_lines(axes, own, "num_models", base)
            axes.set(title=model, xlabel="models in the pack")
    return figure


def _by_size_and_width(packs: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(10, 3.6 * len(LIMITS)), layout="constrained")
    panels = figure.subplots(len(LIMITS), 2, squeeze=False)
    for line, (family, models) in zip(panels, LIMITS.items(), strict=True):
        ratio_lines(line[0], [row for row in packs if row["model"] == family], "batch_size", TUNED)
        line[0].set(title=family, xlabel="images in a batch")
        wider = [{**row, "width": int(row["model"].rpartition("_")[2])} for row in packs if row["model"] in models]
        ratio_lines(line[1], wider, "width", TUNED)
        line[1].set(title=family, xlabel="channels or units")
    return figure


PICTURES = beside(draw)
