"""The table of rows: what was measured on one card, in graphs or eagerly, and never both kinds in one table."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.tables.markdown import markdown_table

Result = Mapping[str, Any]
_GRAPHS = ("streams", "fused", "tuned", "compiled")  # what is captured where it can be; serial never is
_RULES = {"sma": "", "none": ", no averaging"}


def row_name(cell: str) -> str:
    name, k, b, rule, *_ = cell.split(":")
    learners = "" if name in ("tuned", "compiled") else f" K={k}"
    return f"{name}{learners} b={b}{'' if name in ('tuned', 'compiled') else _RULES[rule]}"


def rows_text(result: Result) -> str:
    return rows_table({"": result})


def rows_table(results: Mapping[str, Result]) -> str:
    """The rows of some results; empty without any. Raises ValueError where they are not to be compared."""
    found = [(cell, row) for result in results.values() for cell, row in result["rows"].items()]
    measured = [(cell, row) for cell, row in found if row["ms"]]
    require_one(
        "cards, models and versions",
        {(*result["machine"]["gpus"], result["machine"]["torch"], result["model"]) for result in results.values()},
    )
    require_one("kinds of rounds", {row["rounds"] for cell, row in measured if cell.split(":")[0] in _GRAPHS})
    lines = [
        [row_name(cell), row["precision"], f"{median(row['images_per_s']):,.0f}",
         f"{min(row['images_per_s']):,.0f}–{max(row['images_per_s']):,.0f}",
         f"{median(row['ms']):.3f}", str(row.get("memory_mib", "–")), row["rounds"], str(len(row["ms"]))]
        for cell, row in measured
    ]  # fmt: skip
    head = ["side", "", "images/s", "least–most", "ms a round", "MiB", "rounds", "n"]
    text = markdown_table(head, lines) if lines else ""
    left = [f"{row_name(cell)}: {row.get('error', 'not measured')}." for cell, row in found if not row["ms"]]
    return "\n\n".join([*([text] if text else []), *left])


def require_one(what: str, found: set[Any]) -> None:
    if len(found) > 1:
        names = "; ".join(sorted(map(str, found)))
        raise ValueError(f"a table of rows must not mix {what}, got {names}; keep their results apart.")


TABLES = {"all": rows_text}
TABLES_OVER_ALL = {"rows": rows_table}
