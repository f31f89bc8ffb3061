"""Draws a picture beside every results file: images/s of all sides, and what packs gain, against the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.bench.packs.plot import rate_lines, ratio_lines
from experiments.bench.packs.report import bases_of
from experiments.tables.pictures import beside


def draw(result: Mapping[str, Any]) -> Figure:
    bases = bases_of(result["rows"])
    figure = Figure(figsize=(5 * (1 + len(bases)), 4.2), layout="constrained")
    panels = figure.subplots(1, 1 + len(bases))
    rate_lines(panels[0], result["rows"], "batch_size")
    for axes, base in zip(panels[1:], bases, strict=True):
        ratio_lines(axes, result["rows"], "batch_size", base)
    for axes in panels:
        axes.set_xlabel("images in a batch")
    figure.suptitle(f"{result['figure']['num_models']} models, {result['figure']['title']} ({result['device']})")
    return figure


PICTURES = beside(draw)
