"""Tables of the loader's speed, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]


def headline(result: Result) -> str:
    share = result["method"]["foreign_share"]
    busy = "" if share is None else f" Other programs had {share:.0%} of the core meanwhile."
    return (
        f"{result['images']} training images of {result['folder']}, crops of {result['size']} x {result['size']}, "
        f"cached with a short side of {result['resize']}.{busy}"
    )


def sides_table(result: Result) -> str:
    header = ["", "images/s a core", "÷ Pillow", "÷ decoded", "n"]
    rows = [
        [
            row["name"],
            f"{row['images_per_s']:,.0f}",
            _ratio(row["to_pillow"]),
            _ratio(row["to_decoded"]),
            str(row["n"]),
        ]
        for row in result["rows"]
    ]
    return markdown_table(header, rows)


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\n{sides_table(result)}"


def _ratio(ratio: Mapping[str, float]) -> str:
    if ratio["minimum"] == ratio["maximum"] == 1:
        return "1"
    return spread_text(ratio)


TABLES = {"all": result_text}
