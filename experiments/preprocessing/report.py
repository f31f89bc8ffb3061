"""Tables of the share of preprocessing, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.preprocessing.measure import OWN, WORKER
from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]

# ModelBatch's figure 3: the share with one model, and with 16 that share a feed.
MODELBATCH = {1: 0.815, 16: 0.0194}
TARGET_SHARE = 0.05


def headline(result: Result) -> str:
    method = result["method"]
    setting = (
        f"{result['images']} training images of {result['folder']}, crops of {result['size']} x {result['size']}; a "
        f"five-layer network of {result['parameters']:,} parameters, batches of {result['batch_size']}, windows of "
        f"{method['rounds']} rounds."
    )
    row = max((row for row in result["rows"] if row["side"] == WORKER), key=lambda row: int(row["num_models"]))
    if row["wait_share"] is None:
        return setting
    share = row["wait_share"]["median"]
    verdict = "reached" if share <= TARGET_SHARE else "missed"
    return (
        f"{setting} {row['num_models']} models on one feed wait for preprocessing {_percent(share)} of the time "
        f"(to reach: {TARGET_SHARE:.0%} with 16; {verdict if row['num_models'] == 16 else 'not measured'})."
    )


def shares_table(result: Result) -> str:
    header = ["", "models", "of the time, preprocessing", "models · images/s", "÷ own feed", "n", "dropped"]
    rows = [
        [
            row["side"],
            "any" if row["side"] == OWN else str(row["num_models"]),
            _share(row["wait_share"]),
            "–" if row["images_per_s"] is None else f"{row['images_per_s']:,.0f}",
            "1" if row["side"] == OWN else spread_text(row["speedup"]),
            str(row["n"]),
            str(row["dropped"]),
        ]
        for row in result["rows"]
    ]
    return markdown_table(header, rows)


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\n{shares_table(result)}"


def _share(share: Mapping[str, float] | None) -> str:
    if share is None:
        return "–"
    return f"{_percent(share['median'])} ({_percent(share['minimum'])}–{_percent(share['maximum'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


TABLES = {"all": result_text}
