"""Tables of grids, built from a results object: means over seeds, and when targets were reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from crossbow_py.core.intervals import Estimate, estimate
from experiments.tables.markdown import NONE, markdown_table

_EMA = ", EMA"  # of a row's name: the EMA of the cell's average model
Run = Mapping[str, Any]
Result = Mapping[str, Any]


def result_text(result: Result) -> str:
    return f"![{result['title']}](results/{result['grid']}.png)\n\n{cells_table(result)}\n\n{notes(result)}"


def cells_table(result: Result) -> str:
    found, runs = summaries(result), by_cell(result)
    timed = any(run["alone"] for run in result["runs"])
    header = ["", "K", "b", "test accuracy", "best"]
    header += [f"− {result['reference']}"] if result["reference"] in runs else []
    header += [f"after {epochs:g} epochs" for epochs in result.get("shown_after", ())]
    for target in result["targets"]:
        header += [f"epochs to {target}", *([f"seconds to {target}"] if timed else [])]
    header += ["n", *(["diverged"] if any(cell.diverged for cell in found) else [])]
    return markdown_table(header, [_row(cell, runs, result, timed, "diverged" in header) for cell in found])


def _row(
    cell: CellSummary, runs: Mapping[str, Sequence[Run]], result: Result, timed: bool, diverged: bool
) -> list[str]:
    own, reference = runs[cell.name], _reference(result, cell.name)
    row = [cell.name, *(_setting(own, key) for key in ("num_learners", "batch_size"))]
    row += [accuracy(cell.final), accuracy(cell.best)]
    if result["reference"] in runs:
        found = difference(own, runs.get(reference, ()))
        row.append("" if cell.name == reference else accuracy(found, signed=True))
    row += [accuracy(after(own, epochs)) for epochs in result.get("shown_after", ())]
    for target in result["targets"]:
        then = cell.reached[target]
        row += [when(then, then.epochs, cell.n, "{:.2f}")]
        row += [when(then, then.seconds, cell.n, "{:.1f}")] if timed else []
    return [*row, str(cell.n), *([str(cell.diverged) if cell.diverged else ""] if diverged else [])]


def _reference(result: Result, name: str) -> str:
    """The row that a row is compared with: an EMA with an EMA."""
    return f"{result['reference']}{_EMA if name.endswith(_EMA) else ''}"


def accuracy(found: Estimate | None, signed: bool = False) -> str:
    """A mean with its confidence interval, where there is one."""
    if found is None:
        return NONE
    text = f"{found.mean:{'+' if signed else ''}z.4f}"
    return text if found.half_width is None else f"{text} ± {found.half_width:.4f}"


def when(found: Reached, value: float | None, n: int, form: str) -> str:
    """A mean over the runs that reached a target, and how many did where others did not."""
    if value is None:
        return NONE
    return form.format(value) + ("" if found.n == n else f" ({found.n} of {n})")


def notes(result: Result) -> str:
    runs = result["runs"]
    together, commits = [run for run in runs if not run["alone"]], sorted({str(_of(run, "commit")) for run in runs})
    precisions = sorted({run["summary"]["precision"] for run in runs})
    cells = len({run["cell"] for run in runs})
    said = [
        f"{len(runs)} runs of {cells} cells in {' and '.join(precisions)}, at commit {', '.join(commits)}; ± is a 95 % "
        "confidence interval by Student's t over the seeds."
    ]
    if cells < result["num_cells"]:
        said.append(f"{result['num_cells'] - cells} cells of the grid have not been run.")
    if together:
        said.append(f"{len(together)} runs had others beside them, on one thread each: their times are not used.")
    shares = [run["foreign_share"] for run in runs if run["foreign_share"] is not None]
    if shares:
        said.append(f"Other programs took up to {max(shares):.0%} of the cores during the others." if together else
                    f"Other programs took up to {max(shares):.0%} of the cores meanwhile.")  # fmt: skip
    if any(len({str(_of(run, key)) for run in runs}) > 1 for key in ("cpu", "cores", "torch")):
        said.append("They ran on different machines: their times are not to be compared.")
    return " ".join(said)


def _of(run: Run, key: str) -> Any:
    return run["machine"][key]


def _setting(runs: Sequence[Run], key: str) -> str:
    values = sorted({run["summary"][key] for run in runs})
    return str(values[0]) if len(values) == 1 else f"{values[0]}–{values[-1]}"


@dataclass(frozen=True)
class Reached:
    """The time at which runs of a cell first had a target accuracy at an evaluation: means over those that had it.

    `seconds` are of training, without evaluation, over those of them that ran alone; None without any.
    """

    n: int
    epochs: float | None
    samples: float | None
    seconds: float | None


@dataclass(frozen=True)
class CellSummary:
    """A cell over its seeds. Accuracies are on the test data, of runs that did not diverge; None without any."""

    name: str
    n: int
    diverged: int
    final: Estimate | None
    best: Estimate | None
    reached: Mapping[float, Reached]


def by_cell(result: Result) -> dict[str, list[Run]]:
    """The runs of every cell, in the order of the grid; where an EMA of z was evaluated, z has a row of its own."""
    smoothed = {run["cell"] for run in result["runs"] if any("z_accuracy" in record for record in run["epochs"])}
    found: dict[str, list[Run]] = {}
    for run in result["runs"]:
        name = run["cell"]
        found.setdefault(name, []).append(_of_z(run) if name in smoothed else run)
        if name in smoothed:
            found.setdefault(f"{name}{_EMA}", []).append(run)
    return found


def _of_z(run: Run) -> Run:
    """What a run would be with z evaluated instead of its EMA."""
    if not run["epochs"]:  # it broke before
        return run
    records = [{**record, "test_accuracy": record.get("z_accuracy")} for record in run["epochs"]]
    accuracies = [record["test_accuracy"] for record in records]
    best = max((value for value in accuracies if value is not None), default=None)
    summary = {**run["summary"], "test_accuracy": accuracies[-1], "best_test_accuracy": best}
    return {**run, "epochs": records, "summary": summary}


def summaries(result: Result) -> list[CellSummary]:
    return [summarize(name, runs, result["targets"]) for name, runs in by_cell(result).items()]


def summarize(name: str, runs: Sequence[Run], targets: Sequence[float]) -> CellSummary:
    healthy = [run for run in runs if not has_diverged(run)]
    return CellSummary(
        name=name,
        n=len(runs),
        diverged=len(runs) - len(healthy),
        final=estimate([run["summary"]["test_accuracy"] for run in healthy]),
        best=estimate([run["summary"]["best_test_accuracy"] for run in healthy]),
        reached={target: reached(runs, target) for target in targets},
    )


def reached(runs: Sequence[Run], target: float) -> Reached:
    """Return when the target was reached, on average over the runs that did."""
    found = [(run, record) for run in runs if (record := first_at(run, target)) is not None]
    return Reached(
        n=len(found),
        epochs=_mean([record["epoch"] for _, record in found]),
        samples=_mean([record["samples_seen"] for _, record in found]),
        seconds=_mean([record["elapsed_s"] for run, record in found if run["alone"]]),
    )


def first_at(run: Run, target: float) -> Mapping[str, Any] | None:
    """The record of the first evaluation at or above the target; None when there is none."""
    return next((record for record in run["epochs"] if (record["test_accuracy"] or 0.0) >= target), None)


def after(runs: Sequence[Run], epochs: float) -> Estimate | None:
    """The accuracy at the evaluation after so many epochs (to a hundredth), over the runs that have it."""
    near = [record for run in runs for record in run["epochs"] if abs(record["epoch"] - epochs) < 0.01]
    return estimate([record["test_accuracy"] for record in near if record["test_accuracy"] is not None])


def has_diverged(run: Run) -> bool:
    return bool(run["status"] == "failed")


def difference(own: Sequence[Run], other: Sequence[Run]) -> Estimate | None:
    """The difference of final accuracies to another cell's, seed by seed, over the seeds that both finished."""
    theirs = {run["seed"]: run["summary"]["test_accuracy"] for run in other if not has_diverged(run)}
    pairs = [run for run in own if run["seed"] in theirs and not has_diverged(run)]
    return estimate([run["summary"]["test_accuracy"] - theirs[run["seed"]] for run in pairs])


def mean_curve(runs: Sequence[Run], key: str = "samples_seen") -> tuple[list[float], list[float]]:
    """Means over seeds, evaluation by evaluation, of `key` and of the test accuracy, as far as all seeds go."""
    rows = list(zip(*(run["epochs"] for run in runs if not has_diverged(run)), strict=False))
    return [mean(r[key] for r in row) for row in rows], [mean(r["test_accuracy"] for r in row) for row in rows]


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


TABLES = {"all": result_text}  # of the questions that have no other
