"""Tables of comparisons of packs, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common.markdown import markdown_table
from experiments.common.packs.side import DEFAULT, ONE_AT_A_TIME, TUNED

Row = Mapping[str, Any]
Result = Mapping[str, Any]
NONE = "–"


def best_pack(rows: Sequence[Row]) -> Row | None:
    """The packed row with the highest images/s; None without one that was measured."""
    found = [row for row in rows if row["side"] not in ONE_AT_A_TIME and row["images_per_s"] is not None]
    return max(found, key=lambda row: float(row["images_per_s"])) if found else None


def row_of(rows: Sequence[Row], side: str) -> Row | None:
    """The row of a side; None where there is none."""
    return next((row for row in rows if row["side"] == side), None)


def grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some keys, in the order in which these first come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def summary_row(rows: Sequence[Row]) -> list[str]:
    """Of the rows of one panel: two sides of one model, the best pack, and its ratios to them. See SUMMARY_HEADER."""
    pack = best_pack(rows)
    singles = [_rate(row_of(rows, side)) for side in (DEFAULT, TUNED)]
    if pack is None:
        return [*singles, *[NONE] * 5]
    return [*singles, f"{pack['side']} K={pack['num_models']}", _rate(pack), *_ratios(pack), str(pack["n"])]


SUMMARY_HEADER = ["default_loop", "tuned_single", "best pack", "images/s", "÷ default_loop", "÷ tuned_single", "n"]


def cells_table(rows: Sequence[Row]) -> str:
    """A row for every side that was measured."""
    header = ["model", "b", "side", "K", "threads a model", "images/s", "÷ default_loop", "÷ tuned_single", "n",
              "dropped"]  # fmt: skip
    lines = [
        [
            row["model"],
            str(row["batch_size"]),
            row["side"],
            str(row["num_models"]),
            NONE if row["threads"] is None else str(row["threads"]),
            _rate(row),
            *_ratios(row),
            str(row["n"]),
            str(row["dropped"]),
        ]
        for row in rows
    ]
    return markdown_table(header, lines)


def how(result: Result) -> str:
    """How it was measured, in a line or two."""
    method = result["method"]
    text = (
        f"{' and '.join(result['data'])} images on {result['device']}, fp32; images/s are summed over models; medians "
        f"of {method['repetitions']} windows of {method['seconds']:g} s a side and at least a round, the sides of a "
        "panel taking turns in random order; ratios are medians over repetitions, in brackets the smallest and the "
        "largest"
    )
    if not method["foreign_load_known"]:
        return f"{text}; this kernel does not tell whether others were busy meanwhile, so no window was dropped."
    share = f"{100 * method['max_foreign_share']:g} %"
    return f"{text}; windows during which others took more than {share} of the cores were dropped and tried again."


def left_out(rows: Sequence[Row]) -> str:
    """A sentence on every side that could not be had; nothing when all could."""
    return "\n\n".join(f"Left out: {row['failure']}" for row in rows if row["failure"])


def ratio_text(ratio: Mapping[str, float] | None) -> str:
    """Median, with the smallest and largest."""
    return NONE if ratio is None else f"{ratio['median']:.2f} ({ratio['minimum']:.2f}–{ratio['maximum']:.2f})"


def _ratios(row: Row) -> list[str]:
    return ["1" if row["side"] == base else ratio_text(row["over"][base]) for base in (DEFAULT, TUNED)]


def _rate(row: Row | None) -> str:
    if row is None or row["images_per_s"] is None:
        return NONE
    return f"{row['images_per_s']:,.0f}"
