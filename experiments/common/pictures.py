"""Pictures of an experiment's results, drawn anew from all results files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.common.results import EXPERIMENTS, read_results, results_folder

Result = Mapping[str, Any]


def save_picture(experiment: str, file: str, draw: Callable[[Mapping[str, Result]], Figure]) -> int:
    """One picture of all results, at `file` in the experiment's folder; returns the exit code."""
    return _saved(experiment, lambda results: {EXPERIMENTS / experiment / file: draw(results)})


def save_pictures(experiment: str, draw: Callable[[Result], Figure]) -> int:
    """A picture beside every results file; returns the exit code."""
    folder = results_folder(experiment)
    return _saved(experiment, lambda results: {folder / f"{name}.png": draw(own) for name, own in results.items()})


def _saved(experiment: str, draw: Callable[[Mapping[str, Result]], Mapping[Path, Figure]]) -> int:
    results = read_results(experiment)
    if not results:
        print(f"error: there are no results yet; run experiments/{experiment}/run.py first.", file=sys.stderr)
        return 2
    for path, figure in draw(results).items():
        figure.savefig(path, dpi=130, metadata={"Software": None})
        print(f"drawn to {path.relative_to(EXPERIMENTS.parent)}")
    return 0
