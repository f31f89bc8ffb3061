"""Tables of the seconds to a target accuracy: learners, one model by several optimizers, and PyTorch's default loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from experiments.bench.windows import spread
from experiments.grids.report import Result, Run, accuracy, by_cell, first_at, notes, summarize
from experiments.tables.markdown import NONE, cores, markdown_table, spread_text

Times = dict[int, float]
_ON_FIRST_PAGE = (("resnet8", 0.79, "ResNet-8 on CIFAR-10 to {}, s"), ("lenet", 0.99, "LeNet on MNIST to {}, s"),
                  ("gpt", 0.48, "GPT on bytes to {}, s"))  # fmt: skip
LEARNERS, DEFAULT = "learners", "PyTorch's default loop"
BY_MUON, BY_SGD = "one model, Muon", "one model, SGD"
BY_ADAMW = "one model, AdamW"
BASES = (BY_MUON, BY_SGD, BY_ADAMW, DEFAULT)  # what learners are compared with


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
        cells = [fastest(result, names, times) for names in ((LEARNERS,), (BY_MUON, BY_SGD, BY_ADAMW), (DEFAULT,))]
        values = [f"{median(times[cell].values()):,.1f} ({_own(cell)})" if cell else NONE for cell in cells]
        runs = max(len(times[cell]) for cell in cells if cell)
        rows.append([title.format(target), *values, str(runs), cores(result)])
    return rows


TABLES = {"all": result_text}
HEADLINE = headline_rows
