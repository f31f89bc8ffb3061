"""Tables of the estimator against the truth, built from a results object. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]
Row = Mapping[str, Any]

_KIB, _MIB = 2**10, 2**20


def result_text(result: Result) -> str:
    tables = [errors_table(result), batch_sizes_table(result), searches_table(result), supply_table(result)]
    return "\n\n".join(filter(None, [*tables, notes(result)]))


def errors_table(result: Result) -> str:
    """A row a model: how far the estimates are from the truth, over all learners and limits."""
    header = ["over all K and limits", "parameters", "a sample, MiB", "cells", "exact", "above", "most above",
              "most below", "most below, %", "predicted − true, KiB"]  # fmt: skip
    rows = []
    for entry in result["models"]:
        cells = cells_of(result, entry["model"])
        errors = [cell["estimated"] - cell["true"] for cell in cells]
        over = [(cell["predicted_bytes"] - cell["true_bytes"]) / _KIB for cell in cells if cell["true_bytes"]]
        rows.append([
            entry["model"],
            f"{entry['num_values']:,}",
            f"{entry['activation_bytes_per_sample'] / _MIB:,.2f}",
            str(len(cells)),
            str(errors.count(0)),
            str(sum(error > 0 for error in errors)),
            f"{max(0, *errors)}",
            f"{max(0, *(-error for error in errors))}",
            f"{100 * max(map(shortfall, cells)):.2f}",
            f"{min(over):,.1f} to {max(over):,.1f}" if over else NONE,
        ])  # fmt: skip
    return markdown_table(header, rows)


def batch_sizes_table(result: Result) -> str:
    """A row a model and number of learners: the true largest batch size by limit, and the estimate's difference."""
    limits = sorted({cell["limit_gib"] for cell in result["cells"]})
    header = ["model", "K", "at once", *(f"{limit} GiB" for limit in limits)]
    rows = []
    for model, learners, at_once in _kinds(result):
        cells = {cell["limit_gib"]: cell for cell in cells_of(result, model)
                 if (cell["num_learners"], cell["at_once"]) == (learners, at_once)}  # fmt: skip
        shown = [_shown(cells[limit]) if limit in cells else NONE for limit in limits]
        rows.append([model, str(learners), str(at_once), *shown])
    return markdown_table(header, rows)


def searches_table(result: Result) -> str:
    """A row a model: seconds of the two ways to search, and their quotient."""
    if not result["searches"]:
        return ""
    header = [f"K = 1, {result['search_gib']} GiB", "estimate, s", "doubling, s", "n", "doubling ÷ estimate",
              "of processor time", "rounds tried", "estimate finds", "doubling finds"]  # fmt: skip
    found = {(entry["model"], entry["way"]): entry for entry in result["searches"]}
    rows = []
    for model in dict.fromkeys(model for model, _ in found):
        estimate, doubling = (found[model, way] for way in ("estimate", "doubling"))
        quick, slow = median(estimate["seconds"]), median(doubling["seconds"])
        rows.append([
            model,
            f"{quick:.1f}",
            f"{slow:.1f}",
            str(len(estimate["seconds"])),
            f"{slow / quick:.1f}",
            f"{median(doubling['processor_seconds']) / median(estimate['processor_seconds']):.1f}",
            str(doubling["tries"]),
            str(estimate["batch_size"]),
            str(doubling["batch_size"]),
        ])  # fmt: skip
    return markdown_table(header, rows)


def supply_table(result: Result) -> str:
    """A row a model and number of learners: recommended batch size × workers by the host's memory."""
    sizes = sorted({row["host_gib"] for row in result["supply"]})
    if not sizes:
        return ""
    header = ["model", "K", "fits on the device", *(f"{size} GiB" for size in sizes), "differ from the best"]
    rows = []
    for model, learners in dict.fromkeys((row["model"], row["num_learners"]) for row in result["supply"]):
        own = {row["host_gib"]: row for row in result["supply"]
               if (row["model"], row["num_learners"]) == (model, learners)}  # fmt: skip
        pairs = [" × ".join(map(str, own[size]["recommended"])) if size in own else NONE for size in sizes]
        differ = sum(row["recommended"] != row["best"] for row in own.values())
        rows.append([model, str(learners), str(next(iter(own.values()))["largest_batch"]), *pairs, str(differ)])
    return markdown_table(header, rows)


def notes(result: Result) -> str:
    cells = result["cells"]
    above = sum(cell["estimated"] > cell["true"] for cell in cells)
    sentences = [
        f"- {len(cells)} largest batch sizes: {sum(cell['estimated'] == cell['true'] for cell in cells)} estimates are "
        f"exact, {above} are above the truth; the furthest below is {100 * max(map(shortfall, cells)):.2f} %. In "
        f"{sum(not cell['true'] for cell in cells)} cases nothing fits."
    ]
    if result["command"]:
        seconds, busy_s = result["command"]["seconds"], median(result["command"]["processor_seconds"])
        command = " ".join(["python", *result["command"]["arguments"]])
        sentences.append(
            f"- `{command}` takes {median(seconds):.1f} s (n = {len(seconds)}; {min(seconds):.1f} to "
            f"{max(seconds):.1f} s), the start of Python included, and {busy_s:.1f} s of processor time."
        )
    return "\n".join(sentences)


def cells_of(result: Result, model: str) -> Sequence[Row]:
    return [cell for cell in result["cells"] if cell["model"] == model]


def shortfall(cell: Row) -> float:
    """The part of the true batch size by which the estimate is below it; 0 where nothing fits."""
    return max(0.0, (cell["true"] - cell["estimated"]) / cell["true"]) if cell["true"] else 0.0


def _shown(cell: Row) -> str:
    error = cell["estimated"] - cell["true"]
    return str(cell["true"]) + (f" ({error:+d})" if error else "")


def _kinds(result: Result) -> list[tuple[str, int, int]]:
    return list(dict.fromkeys((cell["model"], cell["num_learners"], cell["at_once"]) for cell in result["cells"]))


TABLES = {"all": result_text}
