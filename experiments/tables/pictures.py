"""Pictures of results: which a question has, and how they are drawn anew.

A question says by PICTURES in its `plot.py` which pictures there are of its results: a function from results by name to
figures by file name, relative to the question's folder. `beside` and `one` make the two usual ones. Without a `plot.py`
they are those of grids of training runs, where it has some.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from experiments.bench.results import EXPERIMENTS, read_results
from experiments.grids.grid import FILE as GRIDS
from experiments.grids.plot import draw_accuracies

Result = Mapping[str, Any]
Results = Mapping[str, Result]
Pictures = Callable[[Results], Mapping[str, Figure]]


def beside(draw: Callable[[Result], Figure]) -> Pictures:
    return lambda results: {f"results/{name}.png": draw(result) for name, result in results.items()}


def one(file: str, draw: Callable[[Results], Figure], keep: Callable[[Result], bool] = lambda _: True) -> Pictures:
    """One picture of all results to keep, none where there is none."""

    def drawn(results: Results) -> Mapping[str, Figure]:
        kept = {name: result for name, result in results.items() if keep(result)}
        return {file: draw(kept)} if kept else {}

    return drawn


def panels(results: Results, height: float, margin: float = 0.0, width: float = 9) -> tuple[Figure, list[Axes]]:
    """A figure with a panel under another for every result."""
    figure = Figure(figsize=(width, margin + height * len(results)), layout="constrained")
    return figure, list(figure.subplots(len(results), 1, squeeze=False)[:, 0])


def bars(axes: Axes, rows: Sequence[tuple[str, float, Sequence[float], str]], **words: str) -> None:
    """Draw bars from above, each with its label, a median, the values that it is of as points, and a colour."""
    for place, (_, middle, values, color) in enumerate(rows):
        axes.barh(place, middle, color=color, alpha=0.6)
        axes.plot(values, [place] * len(values), "k.", markersize=3, alpha=0.5)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.set(xlim=(0, None), **words)
    axes.grid(alpha=0.3, axis="x")


def draw_questions(questions: Sequence[str]) -> int:
    for question in questions:
        pictures = pictures_of(question)
        figures = pictures(read_results(question)) if pictures else {}
        if not figures:
            print(f"error: there is nothing to draw for {question} yet; see {question}/README.md.", file=sys.stderr)
            return 2
        for name, figure in figures.items():
            _save(figure, EXPERIMENTS / question / name)
    return 0


def draw_beside(question: str, path: Path, result: Result) -> None:
    """Draw the pictures of one result beside its file, wherever that is."""
    pictures = pictures_of(question)
    assert pictures is not None, f"{question} has pictures"
    for name, figure in pictures({path.stem: result}).items():
        _save(figure, path.parent / Path(name).name)


def pictures_of(question: str) -> Pictures | None:
    """Return the pictures of a question; None where it has none."""
    if (EXPERIMENTS / question / "plot.py").exists():
        found: Pictures = import_module(f"experiments.{question}.plot").PICTURES
        return found
    return beside(draw_accuracies) if (EXPERIMENTS / question / GRIDS).exists() else None


def _save(figure: Figure, path: Path) -> None:
    """Save 48 colours, which look like all of them and take few bytes."""
    figure.savefig(drawn := BytesIO(), dpi=100)
    picture = Image.open(drawn).convert("RGB").quantize(48, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    print(f"drawn to {path.relative_to(EXPERIMENTS.parent) if path.is_relative_to(EXPERIMENTS) else path}")
