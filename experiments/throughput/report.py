"""The comparison's tables, for the terminal and for README pages alike, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.bench.sides.side import AVERAGING_WORDS, EXECUTOR_SIDES, SINGLE_SIDES
from experiments.bench.windows import dropped_windows
from experiments.tables.markdown import NONE, cores, markdown_table
from experiments.throughput import suite_report
from experiments.throughput.analysis import analysis_text

Result = Mapping[str, Any]
_MODELS = {"mlp": "MLP", "lenet": "LeNet", "resnet32": "ResNet-32", "vgg16": "VGG-16"}


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
    entries = [entry for entry in result["ratios"] if entry["kind"] == "round_time"]
    header = ["executor", "K", "precision", "round with SMA ÷ without", "lowest", "highest", "n"]
    rows = [
        [entry["side"], str(entry["num_learners"]), entry["precision"], f"{entry['ratio']:.3f}",
         f"{entry['minimum']:.3f}", f"{entry['maximum']:.3f}", str(entry["n"])]
        for entry in entries
    ]  # fmt: skip
    return markdown_table(header, rows) if rows else ""


def notes(result: Result) -> str:
    method = result["method"]
    text = (
        f"{result['model']}, b={result['batch_size']}, {result['data']} images on {result['device']}: median of "
        f"{method['repetitions']} windows of {method['seconds']:g} s a side, all sides taking turns in random order; "
        "ratios are medians over repetitions"
    )
    return f"{text}; {dropped_windows(method)}"


def choices(result: Result) -> list[str]:
    """Say what sides chose for themselves by measuring."""
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


def suite_text(result: Result) -> str:
    """All there is to say about a suite, and what its figures are held against."""
    return "\n\n".join(filter(None, [suite_report.result_text(result), analysis_text(result)]))


def headline_rows(results: Mapping[str, Result]) -> list[list[str]]:
    """Images/s on the first page, a row a model: the fastest executor beside the two single-model sides."""
    result, rows = results["suite_cpu"], []
    size = suite_report.main_batch_size(result)
    for model, name in _MODELS.items():
        own = suite_report.rows_of_model(result, model)
        best = suite_report.best_row(own, batch_size=size, sides=EXECUTOR_SIDES)
        single, loop = (
            suite_report.best_row(own, batch_size=size, sides=[side]) for side in ("tuned_single", "default_loop")
        )
        assert best is not None, f"{model} was measured"
        fastest = f"{best['images_per_s']:,.0f} (K={best['num_learners']}, {best['side']})"
        rates = [f"{row['images_per_s']:,.0f}" if row else NONE for row in (single, loop)]
        rows.append([f"{name}, batches of {size}, images/s", fastest, *rates, str(best["n"]), cores(result)])
    return rows


TABLES = {"all": result_text}
TABLES_OF_KIND = {suite_report.KIND: {"all": suite_text, "summary": suite_report.summary_table}}
HEADLINE = headline_rows
