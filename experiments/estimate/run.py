"""Does the estimator find the largest batch size that fits, and how fast?

    python experiments/estimate/run.py [--json PATH]

README.md says what is compared. Nothing needs a GPU. The picture is drawn beside the results file.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed


from crossbow_py.engine.sizing.memory import LearnerModel
from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.estimate.time_search import estimate
from experiments.estimate.truth import SUBJECTS, Subject, TrainingRun
from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]
Row = Mapping[str, Any]
_KIB, _MIB = 2**10, 2**20
GIB = 2**30
SEARCH_GIB = 16  # the limit of the searches that are timed
WAYS = ("estimate", "doubling")
COMMAND = ("-m", "crossbow_py.estimate", "+experiment=resnet50", "memory=16GiB")
_TIME_SEARCH = Path(__file__).with_name("time_search.py")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there, and draw them beside it")
    add = parser.add_argument
    add("--models", choices=list(SUBJECTS), nargs="+", default=list(SUBJECTS), help="default: all")
    add("--num-learners", type=count, nargs="+", default=(1, 2, 4), help="K (default 1 2 4)")
    add("--limits", type=count, nargs="+", default=(2, 4, 8, 16, 32), metavar="GIB", help="default 2 4 8 16 32")
    add("--repetitions", type=int, default=3, help="of timed searches; 0 times nothing (default %(default)s)")
    add("--command-repetitions", type=count, default=5, help="of the timed command (default %(default)s)")
    return measure_and_write(parser, argv, compare_all, result_text, "estimate")


def compare_all(given: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "precision": "fp32", "optimizer": "sgd with momentum", "search_gib": SEARCH_GIB, "models": [], "cells": [],
        "searches": [], "command": None,
    }  # fmt: skip
    models = list(dict.fromkeys(given.models))
    for model in models:
        compare_model(SUBJECTS[model], sorted(set(given.num_learners)), sorted(set(given.limits)), result)
    if given.repetitions:
        result["searches"] = time_searches(models, given.repetitions)
        result["command"] = time_command(given.command_repetitions)
    return result


def compare_model(
    subject: Subject, num_learners: Sequence[int], limits_gib: Sequence[int], result: dict[str, Any]
) -> None:
    """Append a model's entry and its cells."""
    model = estimate(subject)
    result["models"].append({
        "model": subject.model,
        "input_shape": list(subject.input_shape),
        "num_values": model.sizes.num_values,
        "activation_bytes_per_sample": model.activations.per_sample,
    })  # fmt: skip
    for learners in num_learners:
        for at_once in sorted({1, learners}):
            run = TrainingRun(subject, learners, at_once)
            cells = [compare_cell(model, run, gib) for gib in limits_gib]
            result["cells"] += cells
            shown = ", ".join(f"{cell['limit_gib']} GiB {cell['true']}/{cell['estimated']}" for cell in cells)
            print(f"{subject.model} K={learners}, {at_once} at once, true/estimated: {shown}", flush=True)


def compare_cell(model: LearnerModel, run: TrainingRun, limit_gib: int) -> dict[str, Any]:
    """The largest batch size as it is and as it is estimated; and the bytes of the true one, both ways."""
    limit = limit_gib * GIB
    true = run.largest_batch_size(limit)
    return {
        "model": run.subject.model,
        "num_learners": run.num_learners,
        "at_once": run.at_once,
        "limit_gib": limit_gib,
        "true": true,
        "estimated": model.largest_batch_size(limit, run.num_learners, run.at_once),
        "true_bytes": run.peak_bytes(true) if true else None,
        "predicted_bytes": model.predicted_bytes(true, run.num_learners, run.at_once) if true else None,
    }


def time_searches(models: Sequence[str], repetitions: int) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {
        (model, way): {"model": model, "way": way, "seconds": [], "processor_seconds": []}
        for model in models
        for way in WAYS
    }
    for _ in range(repetitions):
        for (model, way), entry in found.items():
            asked = {"model": model, "num_learners": 1, "limit_bytes": SEARCH_GIB * GIB, "way": way}
            answer = json.loads(_output_of([str(_TIME_SEARCH), json.dumps(asked)]).splitlines()[-1])
            entry["seconds"].append(answer.pop("seconds"))
            entry["processor_seconds"].append(answer.pop("processor_seconds"))
            entry.update(answer)
            print(f"{model} {way}: {answer['batch_size']} in {entry['seconds'][-1]:.1f} s", flush=True)
    return list(found.values())


def time_command(repetitions: int) -> dict[str, Any]:
    """Seconds of the whole command, from the start of Python to its end, by the clock and of processors."""
    seconds, busy_s = [], []
    for _ in range(repetitions):
        begin, busy = time.perf_counter(), _children_s()
        _output_of(COMMAND)
        seconds.append(time.perf_counter() - begin)
        busy_s.append(_children_s() - busy)
    return {"arguments": list(COMMAND), "seconds": seconds, "processor_seconds": busy_s}


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _output_of(arguments: Sequence[str]) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def result_text(result: Result) -> str:
    tables = [errors_table(result), batch_sizes_table(result), searches_table(result)]
    return "\n\n".join(filter(None, [*tables, notes(result)]))


def errors_table(result: Result) -> str:
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
    limits = sorted({cell["limit_gib"] for cell in result["cells"]})
    header = ["model", "K", "at once", *(f"{limit} GiB" for limit in limits)]
    rows = []
    kinds = dict.fromkeys((cell["model"], cell["num_learners"], cell["at_once"]) for cell in result["cells"])
    for model, learners, at_once in kinds:
        cells = {cell["limit_gib"]: cell for cell in cells_of(result, model)
                 if (cell["num_learners"], cell["at_once"]) == (learners, at_once)}  # fmt: skip
        shown = [_shown(cells[limit]) if limit in cells else NONE for limit in limits]
        rows.append([model, str(learners), str(at_once), *shown])
    return markdown_table(header, rows)


def searches_table(result: Result) -> str:
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


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
