"""Tables of what starting and telemetry take, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.tables.markdown import NONE, markdown_table, spread_text

Result = Mapping[str, Any]
MOST_IMPORT_RATIO, MOST_HELP_S, MOST_TELEMETRY = 1.2, 3.0, 0.01


def starts_table(result: Result) -> str:
    """A row a command: seconds, and of the processor's."""
    starts = result["starts"]
    rows = [
        [f"`{name}`", *(spread_text(starts[clock][name]) for clock in ("wall_s", "cpu_s")), str(starts["n"])]
        for name in starts["wall_s"]
    ]
    return markdown_table(["", "seconds", "seconds of the processor", "n"], rows)


def telemetry_table(result: Result) -> str:
    header = ["", "a round, ms", "share of training in telemetry", "images/s with ÷ without", "n", "dropped"]
    rows = [
        [
            name,
            NONE if own["round_ms"] is None else f"{own['round_ms']:.2f}",
            spread_text(own["share_of_training"], ".2%"),
            spread_text(own["throughput_ratio"], ".3f"),
            str(own["n"]),
            str(own["dropped"]),
        ]
        for name, own in result["telemetry"].items()
    ]
    return markdown_table(header, rows)


def headline(result: Result) -> str:
    """Say whether it is as little as was wanted."""
    starts = result["starts"]
    ratio, longest = (
        starts["import_ratio"]["median"],
        max(each["median"] for name, each in starts["wall_s"].items() if "help" in name),
    )
    shares = [own["share_of_training"]["median"] for own in result["telemetry"].values() if own["n"]]
    said = [
        f"Importing `crossbow_py` takes {spread_text(starts['import_ratio'], '.2f')} times the processor's time of "
        f"importing torch (at most {MOST_IMPORT_RATIO} was wanted{_verdict(ratio <= MOST_IMPORT_RATIO)}).",
        f"The longest `--help` takes {longest:.1f} s (at most {MOST_HELP_S:g}{_verdict(longest <= MOST_HELP_S)}).",
    ]
    if shares:
        said.append(
            f"Telemetry takes at most {max(shares):.2%} of training (at most {MOST_TELEMETRY:.0%}"
            f"{_verdict(max(shares) <= MOST_TELEMETRY)})."
        )
    return " ".join(said)


def result_text(result: Result) -> str:
    return "\n\n".join([headline(result), starts_table(result), telemetry_table(result)])


def _verdict(reached: bool) -> str:
    return ": reached" if reached else ": missed"


TABLES = {"all": result_text, "headline": headline}
