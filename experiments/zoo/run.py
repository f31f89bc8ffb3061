"""Do models that people bring train on every executor as on `serial`?

    python experiments/zoo/run.py [--models test_vit CLIP] [--processes 2] [--json PATH]

README.md says what is compared and how.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.machine import machine, usable_cores
from experiments.bench.program import count, measuring_parser, show_and_write
from experiments.bench.results import write_result
from experiments.tables.markdown import NONE, markdown_table
from experiments.zoo import speed
from experiments.zoo.comparison import BATCH_SIZE, CHANGE, MULTIPLE, NUM_LEARNERS, NUM_ROUNDS, TOLERANCE, compared
from experiments.zoo.models import PACKAGES, TIMM, TRANSFORMERS, entry_of

Result = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare as asked for; prints the table and returns the exit code: 1 where something is different or crashes."""
    parser = measuring_parser(__doc__, written="write the results there, after every model")
    add = parser.add_argument
    add("--models", nargs="+", metavar="NAME", help="by default all of them")
    add("--processes", type=count, default=usable_cores(), help="a model each (default all cores)")
    options = parser.parse_args(argv)
    packages = dict.fromkeys(TIMM, "timm") | dict.fromkeys(TRANSFORMERS, "transformers")
    wanted = options.models or list(packages)
    if unknown := [name for name in wanted if name not in packages]:
        print(f"error: --models must be of {', '.join(packages)}, got {unknown[0]}.", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "machine": machine(), "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "num_learners": NUM_LEARNERS, "batch_size": BATCH_SIZE, "num_rounds": NUM_ROUNDS, "tolerance": TOLERANCE,
        "multiple": MULTIPLE, "change": CHANGE, "models": [],
    }  # fmt: skip
    for name, found in _compared_side_by_side(wanted, options.processes):
        result["models"].append({"model": name, "package": packages[name], "executors": found})
        result["models"].sort(key=lambda model: list(packages).index(model["model"]))
        print(name, {executor: row["outcome"] for executor, row in found.items()}, flush=True)
        if options.json:
            write_result(options.json, result)
    show_and_write(result, result_text, options.json)
    outcomes = {row["outcome"] for model in result["models"] for row in model["executors"].values()}
    return int(not outcomes.isdisjoint({"DIFFERENT", "crash"}))


def _compared_side_by_side(names: Sequence[str], processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every model in a process of its own, which takes its memory with it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, max_tasks_per_child=1) as pool:
        names_of = {pool.submit(_compared, name): name for name in names}
        for done in as_completed(names_of):
            yield names_of[done], done.result()


def _compared(name: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # packages' own
    return compared(entry_of(name))


def result_text(result: Result) -> str:
    return "\n\n".join([summary_table(result), models_table(result), *_reasons(result)])


def summary_table(result: Result) -> str:
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
TABLES_OF_KIND = {speed.KIND: {"all": speed.result_text, "summary": speed.summary_table}}


if __name__ == "__main__":
    raise SystemExit(main())
