"""Tables of what a checkpoint costs, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.tables.markdown import markdown_table

Result = Mapping[str, Any]
PERIODS_S = (60, 300, 600)
_ROWS = {
    "snapshot_s": "beside training: it stands still for the copy",
    "slowed_s": "beside training: it is slower during the write",
    "beside_s": "beside training, together",
    "still_s": "training stands still",
}


def cost_table(result: Result) -> str:
    """Seconds lost a checkpoint, and the share that is of training time with checkpoints so far apart."""
    header = ["", "seconds lost", *(f"every {period_s} s" for period_s in PERIODS_S), "≤ 2 % from every"]
    return markdown_table(header, [_row(result, name, label) for name, label in _ROWS.items()])


def headline(result: Result) -> str:
    found = result["figures"]
    what = (
        f"{result['num_learners']} learners of {result['model']}, {result['gb']:.2f} GB, beside {result['threads']} "
        f"learners of {result['beside']} with b={result['batch_size']}, a thread each; n = {result['n']}, "
        f"{result['dropped']} dropped."
    )
    if not result["n"]:
        return what
    slower = 1 - found["write_rate"][0] / found["rate"][0]
    return (
        f"{what} Writing beside training takes {found['write_s'][0]:.1f} s, in which that is {slower:.0%} slower. A "
        f"checkpoint written beside training loses {_spread(result['ratio'], '.2f')} of the time of one it stands "
        "still for."
    )


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\n{cost_table(result)}"


def _row(result: Result, name: str, label: str) -> list[str]:
    spread = result["figures"][name]
    if spread is None:
        return [label, *("–" for _ in range(len(PERIODS_S) + 2))]
    shares = [f"{spread[0] / (period_s + spread[0]):.1%}" for period_s in PERIODS_S]
    period_s = result["period_s"].get(name.removesuffix("_s"))
    return [label, _spread(spread, ".2f"), *shares, "" if period_s is None else f"{period_s:.0f} s"]


def _spread(spread: list[float], form: str) -> str:
    middle, smallest, largest = (format(value, form) for value in spread)
    return f"{middle} ({smallest}–{largest})"


TABLES = {"all": result_text}
