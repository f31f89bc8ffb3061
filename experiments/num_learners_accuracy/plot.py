"""Draws a picture beside every results file: accuracy against samples and against seconds, for every side.

python experiments/num_learners_accuracy/plot.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from matplotlib.figure import Figure

from experiments.grids.plot import accuracy_lines
from experiments.grids.summary import Result
from experiments.num_learners_accuracy.run import EXPERIMENT
from experiments.tables.pictures import save_pictures


def main() -> int:
    """Draw all results; returns the exit code."""
    return save_pictures(EXPERIMENT, draw)


def draw(result: Result) -> Figure:
    """A row of two panels a side."""
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


if __name__ == "__main__":
    raise SystemExit(main())
