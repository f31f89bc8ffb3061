"""Tables of throughput by workers and batch size, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.tables.markdown import markdown_table, number, spread_text
from experiments.workers.measure import NEAR_BEST

Result = Mapping[str, Any]


def headline(result: Result) -> str:
    cells = result["cells"]
    judged = [cell for cell in cells if cell["at_recommended"] is not None]
    near = [cell for cell in judged if is_near(cell)]
    return (
        f"{result['images']} training images of {result['folder']}, crops of {result['size']} x {result['size']}. With "
        f"the recommended workers, training is within {1 - NEAR_BEST:.0%} of the best number in {len(near)} of "
        f"{len(judged)} cases that were measured."
    )


def is_near(cell: Mapping[str, Any]) -> bool:
    return bool(cell["at_recommended"]["median"] >= NEAR_BEST)


def workers_table(result: Result) -> str:
    """A row a network and batch size, a column a number of workers."""
    numbers = result["num_workers"]
    header = ["", "B", "load, ms", "step, ms", *(f"W={number}" for number in numbers), "best W", "needed W",
              "recommended W", "÷ best", f"within {1 - NEAR_BEST:.0%}"]  # fmt: skip
    return markdown_table(header, [_row(cell) for cell in result["cells"]])


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\nImages/s, by workers:\n\n{workers_table(result)}\n\n{counts_line(result)}"


def counts_line(result: Result) -> str:
    rows = [row for cell in result["cells"] for row in cell["rows"]]
    fewest, most, dropped = min(r["n"] for r in rows), max(r["n"] for r in rows), sum(r["dropped"] for r in rows)
    n = str(most) if fewest == most else f"{fewest} to {most}"
    return f"n = {n} windows a point; {dropped} were dropped."


def _row(cell: Mapping[str, Any]) -> list[str]:
    ratio = cell["at_recommended"]
    return [
        cell["network"],
        str(cell["batch_size"]),
        number(cell["fetch_ms"], ".2f"),
        number(cell["step_ms"], ".2f"),
        *(number(row["images_per_s"], ",.0f") for row in cell["rows"]),
        number(cell["best"], "d"),
        number(cell["needed"], "d"),
        number(cell["recommended"], "d"),
        spread_text(ratio),
        "–" if ratio is None else "yes" if is_near(cell) else "no",
    ]


TABLES = {"all": result_text}
