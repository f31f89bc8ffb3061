"""Tables of what was killed and what came of it, built from results objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.common.markdown import markdown_table
from experiments.faults.campaign import figures
from experiments.faults.folder import PHASES

Result = Mapping[str, Any]


def phases(result: Result, num_ranks: int) -> Counter[str]:
    """How many kills fell into each, of those with a checkpoint to go on from."""
    runs = [run for run in result["runs"] if run["num_ranks"] == num_ranks]
    return Counter(kill["phase"] for run in runs for kill in run["kills"] if kill["whole"] is not None)


def kill9_table(result: Result) -> str:
    """A row a phase, a column a number of ranks, and below what came of it."""
    columns = sorted({run["num_ranks"] for run in result["runs"]})
    counted = [phases(result, num_ranks) for num_ranks in columns]
    found = [figures([run for run in result["runs"] if run["num_ranks"] == num_ranks]) for num_ranks in columns]
    rows = [[phase, *(str(each[phase]) for each in counted)] for phase in PHASES]
    rows += [
        ["**kills**", *(str(each["kills"]) for each in found)],
        ["of them inside a checkpoint's writing", *(str(each["in_write"]) for each in found)],
        ["resumed from the newest whole checkpoint", *(str(each["resumed"]) for each in found)],
        ["listed checkpoints that were corrupt", *(str(each["corrupt"]) for each in found)],
        [
            "kills before the first checkpoint / started afresh",
            *(f"{each['before_first']} / {each['afresh']}" for each in found),
        ],
        ["**runs** / ended with exit code 0", *(f"{each['runs']} / {each['ended']}" for each in found)],
        ["final model equal to the bit", *(str(each["equal_models"]) for each in found)],
        ["same lines in metrics.jsonl", *(str(each["equal_lines"]) for each in found)],
    ]
    return markdown_table(["", *(f"{n} rank{'s' if n > 1 else ''}" for n in columns)], rows)


def kill9_text(result: Result) -> str:
    """All there is to say about a result."""
    kills = [kill for run in result["runs"] for kill in run["kills"]]
    one = sum(len(kill["ranks"]) == 1 and bool(kill["others"]) for kill in kills)
    ended = [code for kill in kills for code in kill["others"]]
    text = (
        f"Runs of {result['epochs']:g} epochs, killed in chains; {result['minutes']:g} minutes in all. A kill falls "
        f"{median(kill['after_s'] for kill in kills):.2f} s after the first sign of a round (median)."
    )
    if one:
        text += (
            f" In {one} of the kills of two ranks one alone was killed; the other ended by itself with exit code 1 in "
            f"{ended.count(1)}."
        )
    return f"{text}\n\n{kill9_table(result)}"
