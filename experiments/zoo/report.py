"""Tables of the zoo, built from a results object. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]


def result_text(result: Result) -> str:
    return "\n\n".join([summary_table(result), models_table(result), *_reasons(result)])


def summary_table(result: Result) -> str:
    """A row a package: of how many models each executor trains, and how many go silently wrong."""
    executors = _executors(result)
    rows = []
    for package in dict.fromkeys(model["package"] for model in result["models"]):
        models = [model["executors"] for model in result["models"] if model["package"] == package]
        served = [f"{sum(_outcome(own, each) == 'ok' for own in models)} of {len(models)}" for each in executors]
        wrong = sum(row["outcome"] == "DIFFERENT" for own in models for row in own.values())
        crashes = sum(row["outcome"] == "crash" for own in models for row in own.values())
        rows.append([f"{package} {result['versions'][package]}", *served, str(wrong), str(crashes)])
    return markdown_table(["package", *executors, "silently different", "crashes"], rows)


def models_table(result: Result) -> str:
    """A row a model: the outcome on each executor, the largest difference from `serial`, and what runs in loops."""
    executors = _executors(result)
    rows = []
    for model in result["models"]:
        own = model["executors"]
        differences = [row["difference"] for row in own.values() if row.get("difference") is not None]
        controls = [row["control"] for row in own.values() if "control" in row]
        rows.append([
            model["model"],
            *(_outcome(own, executor) for executor in executors),
            f"{max(differences):.0e}" if differences else NONE,
            f"{max(controls):.0e}" if controls else NONE,
            ", ".join(own.get("fused", {}).get("looped", [])) or NONE,
        ])  # fmt: skip
    return markdown_table(["model", *executors, "difference", "control", "fused, learner by learner"], rows)


def _reasons(result: Result) -> list[str]:
    return [
        f"- {model['model']}, {executor}: {row['reason']}"
        for model in result["models"]
        for executor, row in model["executors"].items()
        if "reason" in row
    ]


def _executors(result: Result) -> Sequence[str]:
    return list(dict.fromkeys(executor for model in result["models"] for executor in model["executors"]))


def _outcome(rows: Mapping[str, Mapping[str, Any]], executor: str) -> str:
    return str(rows[executor]["outcome"]) if executor in rows else NONE


TABLES = {"all": result_text}
