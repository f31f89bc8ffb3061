"""Tables of grids, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.grids.summary import CellSummary, Estimate, Reached, Result, Run, by_cell, difference, summaries
from experiments.tables.markdown import NONE, markdown_table


def result_text(result: Result) -> str:
    return f"![{result['title']}](results/{result['grid']}.png)\n\n{cells_table(result)}\n\n{notes(result)}"


def cells_table(result: Result) -> str:
    found, runs = summaries(result), by_cell(result)
    timed = any(run["alone"] for run in result["runs"])
    header = ["", "K", "b", "test accuracy", "best"]
    header += [f"− {result['reference']}"] if result["reference"] in runs else []
    for target in result["targets"]:
        header += [f"epochs to {target}", *([f"seconds to {target}"] if timed else [])]
    header += ["n", *(["diverged"] if any(cell.diverged for cell in found) else [])]
    return markdown_table(header, [_row(cell, runs, result, timed, "diverged" in header) for cell in found])


def _row(
    cell: CellSummary, runs: Mapping[str, Sequence[Run]], result: Result, timed: bool, diverged: bool
) -> list[str]:
    own, reference = runs[cell.name], result["reference"]
    row = [cell.name, *(_setting(own, key) for key in ("num_learners", "batch_size"))]
    row += [accuracy(cell.final), accuracy(cell.best)]
    if reference in runs:
        row.append("" if cell.name == reference else accuracy(difference(own, runs[reference]), signed=True))
    for target in result["targets"]:
        found = cell.reached[target]
        row += [when(found, found.epochs, cell.n, "{:.2f}")]
        row += [when(found, found.seconds, cell.n, "{:.1f}")] if timed else []
    return [*row, str(cell.n), *([str(cell.diverged) if cell.diverged else ""] if diverged else [])]


def accuracy(found: Estimate | None, signed: bool = False) -> str:
    """A mean with its confidence interval, where there is one."""
    if found is None:
        return NONE
    text = f"{found.mean:{'+' if signed else ''}.4f}"
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
    cells = len(by_cell(result))
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
    """A setting of all runs of a cell: one value, or from the least to the most."""
    values = sorted({run["summary"][key] for run in runs})
    return str(values[0]) if len(values) == 1 else f"{values[0]}–{values[-1]}"


TABLES = {"all": result_text}  # of the questions that have no other
