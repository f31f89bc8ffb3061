"""Tables of the accuracy runs, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from experiments.common.markdown import markdown_table

TARGET_ACCURACY = 0.88  # what Crossbow trains this network to
_NONE = "–"

Result = Mapping[str, Any]


def summary_table(result: Result) -> str:
    """A row per seed, and their mean when there are several."""
    header = ["seed", "K", "b", "precision", "executor", "epochs", "test accuracy", "best",
              f"epochs to {TARGET_ACCURACY}", f"minutes to {TARGET_ACCURACY}", "minutes of training",
              "images/s"]  # fmt: skip
    rows = [_summary_row(run) for run in result["runs"]]
    if len(rows) > 1:
        final, best = (mean(run["summary"][key] for run in result["runs"])
                       for key in ("test_accuracy", "best_test_accuracy"))  # fmt: skip
        rows.append(["mean", *[""] * 5, f"{final:.4f}", f"{best:.4f}", *[""] * 4])
    return markdown_table(header, rows)


def _summary_row(run: Mapping[str, Any]) -> list[str]:
    summary, reached = run["summary"], first_at_target(run)
    return [
        str(summary["seed"]),
        str(summary["num_learners"]),
        str(summary["batch_size"]),
        summary["precision"],
        summary["executor"],
        f"{summary['epochs']:.4g}",
        f"{summary['test_accuracy']:.4f}",
        f"{summary['best_test_accuracy']:.4f}",
        _NONE if reached is None else str(reached["epoch"]),
        _NONE if reached is None else f"{reached['elapsed_s'] / 60:.1f}",
        f"{summary['train_time_s'] / 60:.1f}",
        f"{summary['images_per_s']:,.0f}",
    ]


def first_at_target(run: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record of the first epoch that reached the target; None when none did."""
    reached = (record for record in run["epochs"] if (record["test_accuracy"] or 0.0) >= TARGET_ACCURACY)
    return next(reached, None)
