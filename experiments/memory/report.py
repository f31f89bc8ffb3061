"""Tables of the memory of K learners, built from a results object. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crossbow_py.engine.sizing.memory import LearnerBytes
from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]
Row = Mapping[str, Any]

_MIB = 2**20
_PARTS = ("weights", "gradients", "corrections", "state", "shadow", "buffers", "activations")


def result_text(result: Result) -> str:
    failures = [f"{_name(row)} failed: {row['failure']}" for row in result["rows"] if row.get("failure")]
    return "\n\n".join([parts_table(result), peaks_table(result), *failures])


def parts_table(result: Result) -> str:
    """A row a model: the parts of one learner in MiB."""
    header = ["one learner, MiB", "parameters", *_PARTS, "all of it"]
    rows = []
    for entry in result["models"]:
        parts = [_mib(entry["learner"][part], digits=2) for part in _PARTS]
        whole = _mib(LearnerBytes(**entry["learner"]).whole, digits=2)
        rows.append([entry["model"], f"{entry['num_values']:,}", *parts, whole])
    return markdown_table(header, rows)


def peaks_table(result: Result) -> str:
    """A row a model, executor and K."""
    header = ["model", "executor", "K", "measured, MiB", "predicted, MiB", "measured ÷ predicted",
              "an extra learner, MiB", "÷ its own"]  # fmt: skip
    rows = []
    for row in result["rows"]:
        measured, predicted, extra = row["measured_bytes"], row["predicted_bytes"], extra_learner_bytes(result, row)
        rows.append([
            row["model"],
            row["executor"],
            str(row["num_learners"]),
            _mib(measured),
            _mib(predicted),
            NONE if measured is None else f"{measured / predicted:.3f}",
            _mib(extra),
            NONE if extra is None else f"{extra / whole_bytes(result, row['model']):.3f}",
        ])  # fmt: skip
    return markdown_table(header, rows)


def extra_learner_bytes(result: Result, row: Row) -> float | None:
    """The bytes of each learner added since the next smaller K; None for the smallest."""
    before = [other for other in rows_of(result, row["model"], row["executor"])
              if other["num_learners"] < row["num_learners"]]  # fmt: skip
    if row["measured_bytes"] is None or not before:
        return None
    grown = row["measured_bytes"] - before[-1]["measured_bytes"]
    return float(grown / (row["num_learners"] - before[-1]["num_learners"]))


def whole_bytes(result: Result, model: str) -> int:
    return next(LearnerBytes(**entry["learner"]).whole for entry in result["models"] if entry["model"] == model)


def rows_of(result: Result, model: str, executor: str) -> Sequence[Row]:
    rows = [row for row in result["rows"] if row["model"] == model and row["executor"] == executor]
    return sorted((row for row in rows if row["measured_bytes"] is not None), key=lambda row: int(row["num_learners"]))


def _name(row: Row) -> str:
    return f"{row['model']} {row['executor']} K={row['num_learners']}"


def _mib(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value / _MIB:,.{digits}f}"


TABLES = {"all": result_text}
