"""Tables of what two ranks do, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]

NAMES = {
    "alone": "one rank on one core",
    "sma": "two ranks, averaging every round",
    "apart": "two ranks that never average",
    "ddp_1": "DistributedDataParallel, buckets of 1 MB",
    "ddp_25": "DistributedDataParallel, one bucket",
}


def sides_table(result: Result) -> str:
    rows = []
    for side, rates in result["images_per_s"].items():
        kept = [rate for rate in result["images_per_s_windows"][side] if rate]
        rows.append([NAMES[side], _rates(rates), str(len(kept))])
    return markdown_table(["", "images/s in all", "n"], rows)


def ratios_table(result: Result) -> str:
    rows = [
        ["two ranks ÷ one rank on one core", _number(result["sma_over_alone"], ".2f"), "≥ 1.9"],
        ["the same without any averaging: what these cores allow", _number(result["apart_over_alone"], ".2f"), ""],
        ["of a round, averaging that is not hidden", _number(result["exposed_share"], ".1%"), "≤ 5 %"],
        ["two ranks ÷ the better DistributedDataParallel", _number(result["sma_over_ddp"], ".2f"), "≥ 1.0"],
    ]
    return markdown_table(["", "median (least–most)", "wanted"], rows)


def result_text(result: Result) -> str:
    head = (
        f"{result['model']}, b = {result['batch_size']} a rank, windows of {result['rounds']} rounds; "
        f"{result['dropped']} windows were dropped."
    )
    return f"{head}\n\n{sides_table(result)}\n\n{ratios_table(result)}"


def _rates(rates: Mapping[str, float] | None) -> str:
    return "" if rates is None else spread_text(rates, ".1f")


def _number(ratio: Mapping[str, float] | None, form: str) -> str:
    if ratio is None:
        return ""
    return f"{ratio['median']:{form}} ({ratio['minimum']:{form}}–{ratio['maximum']:{form}})"


TABLES = {"all": result_text}
