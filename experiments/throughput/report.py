"""The comparison's tables, for the terminal and for README pages alike, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.common.markdown import NONE, markdown_table
from experiments.common.windows import dropped_windows
from experiments.throughput.sides import AVERAGING_WORDS, SINGLE_SIDES

Result = Mapping[str, Any]


def sides_table(result: Result) -> str:
    """A row per side: throughput, and how many times that of the two single-model sides."""
    header = ["side", "K", "averaging", "precision", "threads a model", "images/s", "÷ default_loop", "÷ tuned_single",
              "n", "dropped"]  # fmt: skip
    rows = []
    for row in result["rows"]:
        single = row["side"] in SINGLE_SIDES
        rows.append([
            row["side"],
            str(row["num_learners"]),
            NONE if single else row["averaging"],
            row["precision"],
            str(row["threads"]),
            NONE if row["images_per_s"] is None else f"{row['images_per_s']:,.0f}",
            _throughput_ratio(result, row, "default_loop"),
            _throughput_ratio(result, row, "tuned_single"),
            str(row["n"]),
            str(row["dropped"]),
        ])  # fmt: skip
    return markdown_table(header, rows)


def rounds_table(result: Result) -> str:
    """A row per executor, K and precision: the time of a round with SMA to that of one without."""
    entries = [entry for entry in result["ratios"] if entry["kind"] == "round_time"]
    header = ["executor", "K", "precision", "round with SMA ÷ without", "lowest", "highest", "n"]
    rows = [
        [entry["side"], str(entry["num_learners"]), entry["precision"], f"{entry['ratio']:.3f}",
         f"{entry['minimum']:.3f}", f"{entry['maximum']:.3f}", str(entry["n"])]
        for entry in entries
    ]  # fmt: skip
    return markdown_table(header, rows) if rows else ""


def notes(result: Result) -> str:
    """What was measured and how, in a line or two."""
    method = result["method"]
    text = (
        f"{result['model']}, b={result['batch_size']}, {result['data']} images on {result['device']}: median of "
        f"{method['repetitions']} windows of {method['seconds']:g} s a side, all sides taking turns in random order; "
        "ratios are medians over repetitions"
    )
    return f"{text}; {dropped_windows(method)}"


def choices(result: Result) -> list[str]:
    """What sides chose for themselves by measuring."""
    chosen = [(row, row["detail"]) for row in result["rows"] if row["detail"]]
    return [f"{row['side']} {row['precision']} chose {detail}, threads: {row['threads']}." for row, detail in chosen]


def missing(result: Result) -> list[str]:
    """Sentences on sides that have no clean window at all."""
    return [
        f"{row['side']} K={row['num_learners']} {AVERAGING_WORDS[row['averaging']]} {row['precision']}: no window was "
        "clean; wait until the machine is quiet, or allow more with --max-foreign-share."
        for row in result["rows"]
        if not row["n"]
    ]


def result_text(result: Result) -> str:
    """All of it."""
    parts = (
        sides_table(result),
        rounds_table(result),
        notes(result),
        *choices(result),
        *missing(result),
    )
    return "\n\n".join(part for part in parts if part)


def _throughput_ratio(result: Result, row: Mapping[str, Any], base: str) -> str:
    keys = ("side", "num_learners", "averaging", "precision")
    for entry in result["ratios"]:
        same = all(entry[key] == row[key] for key in keys)
        if entry["kind"] == "throughput" and same and entry["to"]["side"] == base:
            return f"{entry['ratio']:.2f}"
    return "1" if row["side"] == base else NONE
