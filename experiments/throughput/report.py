"""The comparison's tables, for the terminal and for README pages alike, built from a results object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crossbow_py.engine.modules.precision import PrecisionName
from experiments.bench.sides.side import AVERAGING_WORDS, EXECUTOR_SIDES, SINGLE_SIDES
from experiments.bench.windows import dropped_windows
from experiments.tables.markdown import NONE, Column, columns_table, cores, number_of
from experiments.throughput import suite_report
from experiments.throughput.comparison import mixed
from experiments.throughput.roofline import roofline_of, roofline_text
from experiments.throughput.suite_report import best_row, main_batch_size, models, ratio_text, rows_of_model

MODEL_S = {"cpu": 4.0, "cuda": 10.0}  # seconds that `analyse` takes a model
Result = Mapping[str, Any]
_MODELS = {"mlp": "MLP", "lenet": "LeNet", "resnet32": "ResNet-32", "vgg16": "VGG-16"}


def sides_table(result: Result) -> str:
    return columns_table(result["rows"], {
        "side": "side",
        "K": "num_learners",
        "averaging": lambda row: NONE if row["side"] in SINGLE_SIDES else row["averaging"],
        "precision": "precision",
        "threads a model": "threads",
        "images/s": number_of("images_per_s"),
        "÷ default_loop": lambda row: ratio_text(result, row, "default_loop"),
        "÷ tuned_single": lambda row: ratio_text(result, row, "tuned_single"),
        "n": "n",
        "dropped": "dropped",
    })  # fmt: skip


def ran_with(result: Result) -> list[str]:
    """Say what the rows of each executor ran with, if there is more than operators."""
    found: dict[str, dict[str, None]] = {}
    for row in result["rows"]:
        found.setdefault(f"{row['side']} {row['precision']}", {}).update(dict.fromkeys(row.get("in_effect", ())))
    return [f"{side} ran with {'; '.join(own)}." for side, own in found.items() if set(own) - {"operators"}]


def in_effect_table(result: Result) -> str:
    return columns_table(result["rows"], {
        "side": "side", "b": "batch_size", "K": "num_learners", "averaging": "averaging", "precision": "precision",
        "ran with": lambda row: "; ".join(row.get("in_effect", ())),
    })  # fmt: skip


def rounds_table(result: Result) -> str:
    entries = [entry for entry in result["ratios"] if entry["kind"] == "round_time"]
    columns: dict[str, Column] = {
        "executor": "side", "K": "num_learners", "precision": "precision",
        "round with SMA ÷ without": number_of("ratio", ".3f"), "lowest": number_of("minimum", ".3f"),
        "highest": number_of("maximum", ".3f"), "n": "n",
    }  # fmt: skip
    return columns_table(entries, columns) if entries else ""


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
    """The tables; where rows cannot be compared, why not, and what each ran with."""
    if refusals := mixed(result["rows"], result["device"] == "cuda"):
        return "\n\n".join([*refusals, in_effect_table(result)])
    parts = (
        sides_table(result),
        rounds_table(result),
        notes(result),
        *ran_with(result),
        *choices(result),
        *missing(result),
    )
    return "\n\n".join(part for part in parts if part)


def suite_text(result: Result) -> str:
    if refusals := mixed(result["rows"], result["device"] == "cuda"):
        return "\n\n".join([*refusals, in_effect_table(result)])
    return "\n\n".join(filter(None, [suite_report.result_text(result), *ran_with(result), limits_text(result)]))


def headline_rows(results: Mapping[str, Result]) -> list[list[str]]:
    result, rows = results["suite_cpu"], []
    size = main_batch_size(result)
    for model, name in _MODELS.items():
        own = rows_of_model(result, model)
        best = best_row(own, batch_size=size, sides=EXECUTOR_SIDES)
        single, loop = (
            best_row(own, batch_size=size, sides=[side]) for side in ("tuned_single", "default_loop")
        )
        assert best is not None, f"{model} was measured"
        fastest = f"{best['images_per_s']:,.0f} (K={best['num_learners']}, {best['side']})"
        rates = [f"{row['images_per_s']:,.0f}" if row else NONE for row in (single, loop)]
        rows.append([f"{name}, batches of {size}, images/s", fastest, *rates, str(best["n"]), cores(result)])
    return rows


def analyse(result: Mapping[str, Any], device: str, precision: PrecisionName) -> list[dict[str, Any]]:
    """A roofline row a model, for its fastest fused cell."""
    batch_size, rows = main_batch_size(result), []
    for model in models(result):
        best = best_row(rows_of_model(result, model), batch_size=batch_size, sides=["fused"])
        if best is not None:
            rows.append(roofline_of(model, batch_size, best["num_learners"], precision, best["images_per_s"], device))
    return rows


def limits_text(result: Mapping[str, Any]) -> str:
    rows = result.get("roofline")
    return f"**Limits** of the fastest fused cells\n\n{roofline_text(rows)}" if rows else ""


TABLES = {"all": result_text}
TABLES_OF_KIND = {suite_report.KIND: {"all": suite_text, "summary": suite_report.summary_table}}
HEADLINE = headline_rows
