"""Seconds to a target accuracy: learners, one model by Muon and by SGD, and PyTorch's default loop.

    python experiments/time_to_accuracy/run.py lenet|resnet8|resnet32|gpt [--cells PATTERN] [--seeds 0,1,...]

Writes results/GRID.json. README.md says what the sides are. Sides take turns, seed by seed; a run that is done is not
made again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.windows import spread
from experiments.grids.grid import NESTEROV, RESNET8, TRAIN, Cell, Grid, cells
from experiments.grids.report import Result, Run, accuracy, by_cell, first_at, notes, summarize
from experiments.grids.running import run_grid
from experiments.tables.markdown import NONE, cores, markdown_table, spread_text

Times = dict[int, float]
_ON_FIRST_PAGE = (("resnet8", 0.79, "ResNet-8 on CIFAR-10 to {}, s"), ("lenet", 0.99, "LeNet on MNIST to {}, s"))
LEARNERS, DEFAULT = "learners", "PyTorch's default loop"
BY_MUON, BY_SGD = "one model, Muon", "one model, SGD"
BY_ADAMW = "one model, AdamW"
BASES = (BY_MUON, BY_SGD, BY_ADAMW, DEFAULT)  # what learners are compared with
DEFAULT_LOOP = "experiments.time_to_accuracy.default_loop"
LENET = "+experiment=lenet max_epochs=2"
GPT = "+experiment=gpt_tiny max_epochs=0.2 evaluations_per_epoch=1"
RESNET32 = "+experiment=resnet32_short checkpoint_every_s=120"
# Rates follow the samples of a round, by their power of 0.75; every side has the fewest epochs in which it got there.
_MUON = "num_learners=1 batch_size=64 optimizer.learning_rate=0.05 optimizer.other_learning_rate=0.17"
_ADAMW = (
    "optimizer=adamw optimizer.learning_rate=0.003 optimizer.beta2=0.99 optimizer.weight_decay=0.1 "
    "optimizer.clip_norm=1.0"
)
_SGD = f"num_learners=1 batch_size=64 {NESTEROV} optimizer.learning_rate=0.17"


def side(name: str, common: str, own: Mapping[str, str], parts: int = 1) -> tuple[Cell, ...]:
    """Cells of one side, each with what it is called beside the side's name."""
    found = cells(common, {f"{name}, {words}": overrides for words, overrides in own.items()}, parts)
    program = DEFAULT_LOOP if name == DEFAULT else TRAIN
    return tuple(replace(cell, labels={"side": name}, program=program) for cell in found)


def of_resnet(common: str, sgd_epochs: int, default_epochs: int) -> tuple[Cell, ...]:
    """The sides of a ResNet: learners by the recipe, and others, of which those by SGD take epochs of their own."""
    return (
        *side(LEARNERS, common, {"K=4, b=32": ""}),
        *side(BY_MUON, common, {"b=64": _MUON, "b=128": "num_learners=1 batch_size=128"}),
        *side(BY_SGD, common, {"b=64": f"{_SGD} max_epochs={sgd_epochs}"}),
        *side(DEFAULT, common, {"b=64": f"{_SGD} max_epochs={default_epochs} data.flip=true"}),
    )


_LENET_BATCHES = {b: f"num_learners=1 batch_size={b} optimizer.learning_rate={0.03 * b / 32:g}" for b in (32, 64, 128)}
GRIDS = {
    grid.name: grid
    for grid in (
        Grid("lenet", "LeNet on MNIST",
             (*side(LEARNERS, LENET, {"K=2, b=32": "num_learners=2", "K=4, b=32": "num_learners=4",
                                      "K=2, b=64": "num_learners=2 batch_size=64 optimizer.learning_rate=0.06"}, 4),
              *side(BY_SGD, LENET, {f"b={b}": words for b, words in _LENET_BATCHES.items()}, 4),
              *side(DEFAULT, LENET, {f"b={b}": _LENET_BATCHES[b] for b in (32, 64)}, 4)),
             seeds=(0, 1, 2, 3, 4), targets=(0.99,), alone=True),
        Grid("resnet8", "ResNet-8 on CIFAR-10", of_resnet(f"{RESNET32} {RESNET8} max_epochs=3", 5, 6), targets=(0.79,),
             alone=True),
        Grid("gpt", "a GPT of 0.84 M on bytes of Python",
             (*side(LEARNERS, GPT, {"K=2, b=4": "", "K=2, b=4, AdamW": _ADAMW}, 25),
              *side(BY_MUON, GPT, {"b=8": "num_learners=1 batch_size=8"}, 25),
              *side(BY_ADAMW, GPT, {f"b={b}": f"num_learners=1 batch_size={b} {_ADAMW}" for b in (8, 16)}, 25),
              *side(DEFAULT, GPT, {"b=8": f"num_learners=1 batch_size=8 {_ADAMW}"}, 25)),
             targets=(0.48,), alone=True),
        Grid("resnet32", "ResNet-32 on CIFAR-10", of_resnet(RESNET32, 10, 10), targets=(0.88, 0.9), alone=True),
    )
}  # fmt: skip


def sides_table(result: Result, target: float) -> str:
    runs, times = by_cell(result), times_of(result, target)
    there = {own[0]["labels"]["side"] for own in runs.values()}
    sides = [name for name in BASES if name in there]
    bases = [fastest(result, (name,), times) for name in sides]
    of_tokens = any(run["summary"].get("tokens_per_s") for own in runs.values() for run in own)
    header = ["", "K", "b", "precision", "executor", "test accuracy", f"seconds to {target}", "epochs",
              *(f"{name} ÷" for name in sides), *(["tokens/s"] if of_tokens else []), "others took", "n"]  # fmt: skip
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
                *([_spread(_tokens_per_s(own), len(own), ",.0f")] if of_tokens else []),
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


def fastest(result: Result, sides: Sequence[str], times: dict[str, Times]) -> str | None:
    """The cell of these sides with the least median of seconds; None where none reached the target."""
    own = [name for name, runs in by_cell(result).items() if runs[0]["labels"]["side"] in sides and times[name]]
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


def _own(cell: str) -> str:
    """What a cell is called without the name of its side, but for the optimizer."""
    for name in (LEARNERS, DEFAULT, "one model"):
        cell = cell.removeprefix(f"{name}, ")
    return cell


def _epochs(runs: list[Run], target: float) -> list[float]:
    return [record["epoch"] for run in runs if (record := first_at(run, target)) is not None]


def _tokens_per_s(runs: list[Run]) -> list[float]:
    return [found for run in runs if (found := run["summary"].get("tokens_per_s"))]


def _foreign(runs: list[Run]) -> str:
    shares = [run["foreign_share"] for run in runs if run["foreign_share"] is not None]
    return f"{median(shares):.0%} (≤ {max(shares):.0%})" if shares else NONE


def headline_rows(results: Mapping[str, Result]) -> list[list[str]]:
    rows = []
    for name, target, title in _ON_FIRST_PAGE:
        result = results[name]
        times = times_of(result, target)
        cells = [fastest(result, names, times) for names in ((LEARNERS,), (BY_MUON, BY_SGD), (DEFAULT,))]
        values = [f"{median(times[cell].values()):,.1f} ({_own(cell)})" if cell else NONE for cell in cells]
        runs = max(len(times[cell]) for cell in cells if cell)
        rows.append([title.format(target), *values, str(runs), cores(result)])
    return rows


TABLES = {"all": result_text}
HEADLINE = headline_rows
main = partial(run_grid, "time_to_accuracy", GRIDS)


if __name__ == "__main__":
    raise SystemExit(main())
