"""Seconds to a target accuracy: learners, one tuned model, and PyTorch's default loop; writes results/GRID.json.

    python experiments/time_to_accuracy/run.py lenet|resnet32 [--cells PATTERN] [--seeds 0,1,...]

README.md says what the sides are. Sides take turns, seed by seed; a run that is done is not made again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.bench.windows import spread
from experiments.grids.grid import Cell, Grid, cells, merged
from experiments.grids.report import Result, Run, accuracy, by_cell, first_at, notes, summarize
from experiments.grids.running import run_grid
from experiments.tables.markdown import NONE, cores, markdown_table, spread_text

Times = dict[int, float]
_ON_FIRST_PAGE = (("resnet32", 0.88, "ResNet-32 on CIFAR-10 to {}, s"), ("lenet", 0.99, "LeNet on MNIST to {}, s"))
LEARNERS, TUNED, DEFAULT = "learners", "one tuned model", "PyTorch's default loop"
DEFAULT_LOOP = "experiments.time_to_accuracy.default_loop"
LENET = "+experiment=lenet max_epochs=2"
# Where small batches are far from the limit, both sides may be faster with larger ones.
LARGER = (
    *cells(LENET,
           {f"{LEARNERS}, K=2, b=64": "num_learners=2 batch_size=64 optimizer.learning_rate=0.06"}, parts=4),
    *cells(LENET,
           {f"{TUNED}, b=128": "num_learners=1 batch_size=128 optimizer.learning_rate=0.12"}, parts=4),
)  # fmt: skip
RESNET32 = "+experiment=resnet32_short max_epochs=12 checkpoint_every_s=120"


def sides(recipe: str, num_learners: tuple[int, ...], batch: int, rate: float, parts: int = 1) -> tuple[Cell, ...]:
    """Learners by the recipe, and one model at the learner's batch and, with twice the rate, at twice of it."""
    single = {f"b={batch}": f"batch_size={batch}",
              f"b={2 * batch}": f"batch_size={2 * batch} optimizer.learning_rate={2 * rate:g}"}  # fmt: skip
    learners = cells(recipe, {f"{LEARNERS}, K={k}, b={batch}": f"num_learners={k}" for k in num_learners}, parts)
    tuned = cells(f"{recipe} num_learners=1", {f"{TUNED}, {own}": words for own, words in single.items()}, parts)
    default = tuple(
        Cell(f"{DEFAULT}, {own}", merged(recipe.split(), ("num_learners=1",), words.split()),
             program=DEFAULT_LOOP, parts=parts)
        for own, words in single.items()
    )
    kinds = ((LEARNERS, learners), (TUNED, tuned), (DEFAULT, default))
    return tuple(replace(cell, labels={"side": side}) for side, found in kinds for cell in found)


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("lenet", "LeNet on MNIST",
             (*sides(LENET, (2, 4), 32, 0.03, parts=4),
              *(replace(cell, labels={"side": cell.name.partition(",")[0]}) for cell in LARGER)),
             seeds=(0, 1, 2, 3, 4), targets=(0.99,), alone=True),
        Grid("resnet32", "ResNet-32 on CIFAR-10",
             tuple(cell for cell in sides(RESNET32, (2,), 32, 0.1) if cell.name != f"{DEFAULT}, b=32"),  # 64 is faster
             seeds=(0, 1), targets=(0.88, 0.9), alone=True),
    )
}  # fmt: skip


def sides_table(result: Result, target: float) -> str:
    runs, times = by_cell(result), times_of(result, target)
    bases = [fastest(result, side, times) for side in (TUNED, DEFAULT)]
    header = ["", "K", "b", "precision", "executor", "test accuracy", f"seconds to {target}", "epochs",
              f"{TUNED} ÷", f"{DEFAULT} ÷", "others took", "n"]  # fmt: skip
    rows = []
    for name, own in runs.items():
        summary = own[0]["summary"]
        rows.append(
            [
                name,
                *(str(summary[key]) for key in ("num_learners", "batch_size", "precision", "executor")),
                accuracy(summarize(name, own, ()).final),
                _spread(list(times[name].values()), len(own), ".1f"),
                _spread(_epochs(own, target), len(own), ".2f"),
                *(_ratio(times[base], times[name]) if base else NONE for base in bases),
                _foreign(own),
                str(len(own)),
            ]
        )
    return markdown_table(header, rows)


def times_of(result: Result, target: float) -> dict[str, Times]:
    """The seconds of the runs that reached the target, by cell and seed."""
    return {
        name: {run["seed"]: record["elapsed_s"] for run in runs if (record := first_at(run, target)) is not None}
        for name, runs in by_cell(result).items()
    }


def fastest(result: Result, side: str, times: dict[str, Times]) -> str | None:
    """The cell of a side with the least median of seconds; None where none reached the target."""
    own = [name for name, runs in by_cell(result).items() if runs[0]["labels"]["side"] == side and times[name]]
    return min(own, key=lambda name: median(times[name].values()), default=None)


def result_text(result: Result) -> str:
    tables = [sides_table(result, target) for target in result["targets"]]
    return "\n\n".join([f"![{result['title']}](results/{result['grid']}.png)", *tables, notes(result)])


def _ratio(base: Times, own: Times) -> str:
    return spread_text(spread([base[seed] / own[seed] for seed in own if seed in base]))


def _spread(values: list[float], n: int, form: str) -> str:
    """Median, least and most of those that reached the target, and how many did where others did not."""
    found = spread(values)
    if found is None:
        return NONE
    return spread_text(found, form) + ("" if len(values) == n else f", {len(values)} of {n}")


def _epochs(runs: list[Run], target: float) -> list[float]:
    return [record["epoch"] for run in runs if (record := first_at(run, target)) is not None]


def _foreign(runs: list[Run]) -> str:
    shares = [run["foreign_share"] for run in runs if run["foreign_share"] is not None]
    return f"{median(shares):.0%} (≤ {max(shares):.0%})" if shares else NONE


def headline_rows(results: Mapping[str, Result]) -> list[list[str]]:
    rows = []
    for name, target, title in _ON_FIRST_PAGE:
        result = results[name]
        times = times_of(result, target)
        cells = [fastest(result, side, times) for side in (LEARNERS, TUNED, DEFAULT)]
        values = [f"{median(times[cell].values()):,.1f}" if cell else NONE for cell in cells]
        runs = max(len(times[cell]) for cell in cells if cell)
        own = cells[0].removeprefix(f"{LEARNERS}, ") if cells[0] else ""
        rows.append([title.format(target), f"{values[0]} ({own})", *values[1:], str(runs), cores(result)])
    return rows


TABLES = {"all": result_text}
HEADLINE = headline_rows
main = partial(run_grid, "time_to_accuracy", GRIDS)


if __name__ == "__main__":
    raise SystemExit(main())
