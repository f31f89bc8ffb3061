"""Tables of the auto-tuner's runs, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.tables.markdown import columns_table, number_of

Result = Mapping[str, Any]
_SETTLING_S = 5.0  # at the end of a phase, when it has had the time to settle


def phases(result: Result) -> list[dict[str, Any]]:
    """Before, with and after the neighbour: the learners at the end of each, and the throughput of its last seconds."""
    begins_s, ends_s = result["neighbour"]["begins_s"], result["neighbour"]["ends_s"]
    last_s = result["throughput"][-1][0]
    found = []
    for name, first_s, end_s in (("before", 0.0, begins_s), ("with", begins_s, ends_s), ("after", ends_s, last_s)):
        late = [point for point in result["throughput"] if max(first_s, end_s - _SETTLING_S) <= point[0] <= end_s]
        decisions = [one for one in result["decisions"] if first_s <= one["elapsed_s"] < end_s]
        found.append({
            "phase": f"{name} the neighbour",
            "seconds": end_s - first_s,
            "decisions": len(decisions),
            "num_learners": late[-1][2],
            "images_per_s": median(point[1] for point in late),
        })  # fmt: skip
    return found


def phases_table(result: Result) -> str:
    return columns_table(phases(result), {
        "": "phase", "seconds": number_of("seconds"), "decisions": "decisions", "learners at its end": "num_learners",
        "images/s of its last 5 s": number_of("images_per_s"),
    })  # fmt: skip


def decisions_list(result: Result) -> str:
    return "\n".join(f"- {one['elapsed_s']:.1f} s: {one['reason']}" for one in result["decisions"])


def result_text(result: Result) -> str:
    return f"{phases_table(result)}\n\n{decisions_list(result)}"


TABLES = {"all": result_text}
