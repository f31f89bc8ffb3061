"""Tables of comparisons of packs, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments.bench.packs.side import BASES, DEFAULT, ONE_AT_A_TIME, TUNED
from experiments.bench.windows import dropped_windows
from experiments.tables.markdown import NONE, columns_table, number, number_of, spread_text

Row = Mapping[str, Any]
Result = Mapping[str, Any]


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


def bases_of(rows: Sequence[Row]) -> list[str]:
    return [base for base in BASES if base in (DEFAULT, TUNED) or row_of(rows, base) is not None]


def summary_header(rows: Sequence[Row]) -> list[str]:
    bases = bases_of(rows)
    return [*bases, "best pack", "images/s", *(f"÷ {base}" for base in bases), "n"]


def summary_row(rows: Sequence[Row]) -> list[str]:
    """Sum up the rows of one panel: the sides of one model at a time, the best pack, and its ratios to them."""
    pack, bases = best_pack(rows), bases_of(rows)
    singles = [_rate(row_of(rows, side)) for side in bases]
    if pack is None:
        return [*singles, *[NONE] * (3 + len(bases))]
    ratios = (_ratio(pack, base) for base in bases)
    return [*singles, f"{pack['side']} K={pack['num_models']}", _rate(pack), *ratios, str(pack["n"])]


def cells_table(rows: Sequence[Row]) -> str:
    """A row for every side that was measured."""
    return columns_table(rows, {
        "model": "model", "b": "batch_size", "side": "side", "K": "num_models",
        "threads a model": number_of("threads", "d"),
        "images/s": _rate,
        **{f"÷ {base}": partial(_ratio, base=base) for base in bases_of(rows)},
        "n": "n", "dropped": "dropped",
    })  # fmt: skip


def how(result: Result) -> str:
    """Say how it was measured, in a line or two."""
    method = result["method"]
    text = (
        f"{' and '.join(result['data'])} images on {result['device']}, fp32; images/s are summed over models; medians "
        f"of {method['repetitions']} windows of {method['seconds']:g} s a side and at least a round, the sides of a "
        "panel taking turns in random order; ratios are medians over repetitions, in brackets the smallest and the "
        "largest"
    )
    return f"{text}; {dropped_windows(method)}"


def left_out(rows: Sequence[Row]) -> str:
    """A sentence on every side that could not be had; nothing when all could."""
    return "\n\n".join(f"Left out: {row['failure']}" for row in rows if row["failure"])


def _ratio(row: Row, base: str) -> str:
    return "1" if row["side"] == base else spread_text(row["over"][base])


def _rate(row: Row | None) -> str:
    return NONE if row is None else number(row["images_per_s"], ",.0f")
