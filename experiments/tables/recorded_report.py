"""Tables of recorded runs, built from a results object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from experiments.grids.recorded_runs import RecordedRuns
from experiments.grids.summary import first_at
from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]


def table_of(recorded: RecordedRuns) -> Callable[[Result], str]:
    return lambda result: summary_table(result, recorded.target_accuracy)


def summary_table(result: Result, target_accuracy: float) -> str:
    """A row per seed, and their mean when there are several; with what the data cost where workers loaded them."""
    runs = result["runs"]
    header = ["seed", "K", "b", "precision", "executor", "epochs", "test accuracy", "best",
              f"epochs to {target_accuracy}", f"minutes to {target_accuracy}", "minutes of training",
              "images/s"]  # fmt: skip
    rows = [_summary_row(run, target_accuracy) for run in runs]
    if any(run["summary"].get("num_workers") is not None for run in runs):
        header = [*header, "workers", "waiting for data"]
        rows = [[*row, *_data_cells(run)] for row, run in zip(rows, runs, strict=True)]
    if len(rows) > 1:
        final, best = (mean(run["summary"][key] for run in runs) for key in ("test_accuracy", "best_test_accuracy"))
        rows.append(["mean", *[""] * 5, f"{final:.4f}", f"{best:.4f}", *[""] * (len(header) - 8)])
    return markdown_table(header, rows)


def _summary_row(run: Mapping[str, Any], target_accuracy: float) -> list[str]:
    summary, reached = run["summary"], first_at(run, target_accuracy)
    return [
        str(summary["seed"]),
        str(summary["num_learners"]),
        str(summary["batch_size"]),
        summary["precision"],
        summary["executor"],
        f"{summary['epochs']:.4g}",
        f"{summary['test_accuracy']:.4f}",
        f"{summary['best_test_accuracy']:.4f}",
        NONE if reached is None else str(reached["epoch"]),
        NONE if reached is None else f"{reached['elapsed_s'] / 60:.1f}",
        f"{summary['train_time_s'] / 60:.1f}",
        f"{summary['images_per_s']:,.0f}",
    ]


def _data_cells(run: Mapping[str, Any]) -> list[str]:
    """Cells on data; nothing is known of data that lived on the device, and in records older than these numbers."""
    num_workers, wait_share = (run["summary"].get(key) for key in ("num_workers", "data_wait_share"))
    return [NONE if num_workers is None else str(num_workers), NONE if wait_share is None else f"{wait_share:.1%}"]
