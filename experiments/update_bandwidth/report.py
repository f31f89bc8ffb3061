"""Tables of the update's bandwidth, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.tables.markdown import NONE, markdown_table, number, spread_text

Result = Mapping[str, Any]
_NAMES = {"whole": "gate and update", "gate": "of this, the gate", "update": "of this, the update"}


def label(row: Mapping[str, Any]) -> str:
    return f"{row['name']} copy" if row["kind"] == "copy" else _NAMES[row["part"]]


def bandwidth_table(result: Result) -> str:
    """A row for the update, its parts and every copy."""
    header = ["", "MB", "GB/s", f"÷ {result['copy'] or 'fastest'} copy", "n", "dropped"]
    rows = [
        [
            label(row),
            f"{row['mb']:,.0f}",
            number(row["gb_per_s"], ".1f"),
            "1" if row["name"] == result["copy"] else _ratio(row),
            str(row["n"]),
            str(row["dropped"]),
        ]
        for row in result["rows"]
    ]
    return markdown_table(header, rows)


def headline(result: Result) -> str:
    counted = ", ".join(f"{name} {count}" for name, count in result["bytes_a_value"].items())
    return (
        f"{result['model']}, K = {result['num_learners']}, {result['precision']} on {result['device']}, "
        f"{result['threads']} threads, {result['num_values']:,} trained values; bytes a value: {counted}."
    )


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\n{bandwidth_table(result)}"


def _ratio(row: Mapping[str, Any]) -> str:
    return NONE if row["ratio"] is None else spread_text({**row, "median": row["ratio"]})


TABLES = {"all": result_text}
