"""Tables of what executors train, and of what comparing them costs, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.tables.markdown import markdown_table, spread_text

Result = Mapping[str, Any]
SAME = 1e-4  # relative: float32 after ten rounds


def result_text(result: Result) -> str:
    if "throughput" in result:
        return throughput_table(result)
    return nets_table(result) if "nets" in result else setup_table(result)


def nets_table(result: Result) -> str:
    """A row a network: how far each executor ends from plain PyTorch; and why executors were refused."""
    executors = list(next(iter(result["nets"].values())))
    rows = [[name, *(_cell(own[executor]) for executor in executors)] for name, own in result["nets"].items()]
    reasons = {own["refused"] for each in result["nets"].values() for own in each.values() if "refused" in own}
    return "\n\n".join([markdown_table(["", *executors], rows), *(f"- {reason}" for reason in sorted(reasons))])


def _cell(own: Mapping[str, Any]) -> str:
    if "refused" in own:
        return "refused"
    verdict = "" if own["distance"] <= SAME else " DIFFERENT"
    return f"{own['distance']:.0e} ({own['executor']}){verdict}"


def setup_table(result: Result) -> str:
    """A row a model and format: seconds without and with the comparison, and their ratio."""
    rows = [
        [name, *(spread_text(own[key], form) for key, form in (("without", ".2f"), ("with", ".2f"), ("ratio", ".2f"))),
         str(own["n"])]
        for name, own in result["setup"].items()
    ]  # fmt: skip
    return markdown_table(["", "without, s", "with, s", "with ÷ without", "n"], rows)


def throughput_table(result: Result) -> str:
    """A row a model and executor: images/s before and now, and their ratio."""
    columns = (("before", ",.0f"), ("now", ",.0f"), ("ratio", ".3f"))
    rows = [
        [name, *(spread_text(own[key], form) for key, form in columns), str(own["n"])]
        for name, own in result["throughput"].items()
    ]
    return markdown_table(["", f"commit {result['before']}, images/s", "now, images/s", "now ÷ before", "n"], rows)


TABLES = {"all": result_text}
