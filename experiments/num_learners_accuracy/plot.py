"""Draws a picture beside every results file: accuracy against samples and against seconds, for every side."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments.grids.plot import accuracy_lines
from experiments.grids.report import Result
from experiments.tables.pictures import beside


def draw(result: Result) -> Figure:
    sides = list(dict.fromkeys(run["labels"]["side"] for run in result["runs"]))
    figure = Figure(figsize=(10, 0.6 + 3.4 * len(sides)), layout="constrained")
    panels = figure.subplots(len(sides), 2, squeeze=False, sharey="row")
    for side, (samples, seconds) in zip(sides, panels, strict=True):
        own = {**result, "runs": [run for run in result["runs"] if run["labels"]["side"] == side]}
        accuracy_lines(samples, own, "samples_seen")
        accuracy_lines(seconds, own, "elapsed_s", legend=True)
        seconds.set_ylabel("")
    figure.suptitle(result["title"])
    return figure


PICTURES = beside(draw)
