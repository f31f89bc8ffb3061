"""Pictures of an experiment's results, drawn anew from all results files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.bench.results import EXPERIMENTS, read_results, results_folder

Result = Mapping[str, Any]


def save_picture(
    experiment: str,
    file: str,
    draw: Callable[[Mapping[str, Result]], Figure],
    *,
    keep: Callable[[Result], bool] = lambda _: True,
) -> int:
    """One picture of all results to keep, at `file` in the experiment's folder; returns the exit code."""
    return _saved(experiment, lambda results: {EXPERIMENTS / experiment / file: draw(results)}, keep)


def save_pictures(experiment: str, draw: Callable[[Result], Figure]) -> int:
    """A picture beside every results file; returns the exit code."""
    folder = results_folder(experiment)
    return _saved(experiment, lambda results: {folder / f"{name}.png": draw(own) for name, own in results.items()})


def draw_beside(description: str | None, draw: Callable[[Result], Figure], argv: Sequence[str] | None) -> int:
    """The command line that draws one results file, with the picture beside it; returns the exit code."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("result", type=Path, help="a results file of run.py")
    path: Path = parser.parse_args(argv).result
    picture = path.with_suffix(".png")
    _save(draw(json.loads(path.read_text())), picture)
    print(f"drawn to {picture}")
    return 0


def _saved(
    experiment: str,
    draw: Callable[[Mapping[str, Result]], Mapping[Path, Figure]],
    keep: Callable[[Result], bool] = lambda _: True,
) -> int:
    results = {name: result for name, result in read_results(experiment).items() if keep(result)}
    if not results:
        print(f"error: there are no results yet; run experiments/{experiment}/run.py first.", file=sys.stderr)
        return 2
    for path, figure in draw(results).items():
        _save(figure, path)
        print(f"drawn to {path.relative_to(EXPERIMENTS.parent)}")
    return 0


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, metadata={"Software": None})
