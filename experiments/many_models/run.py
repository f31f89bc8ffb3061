"""Many small models from one call, against a plain loop, a process a core, torch.func and JAX.

    python experiments/many_models/run.py [--tasks TASK ...] [--opponents | --counts K ...] [--repetitions N] [--quick]
                                          [--json PATH]

README.md says what the tasks and sides are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.bench.machine import ROOT
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.many_models import tokens
from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]
_JOBS = Path(__file__).with_name("jobs.py")
PLAIN, CORES, BY_WIDTH = "plain loop", "a process a core", "packs by width"
FUNC, JAX, OPPONENTS, COUNTS = "torch.func", "JAX", "opponents", "counts"
_TOLD = ("many", PLAIN)
_HEAD = (
    "", "first call, s", "later, s", "÷ plain loop", "÷ a process a core", "÷ packs by width", "models a minute",
    "images/s", "÷ images/s of the loop, of processes", "test loss: many · plain", "n",
)  # fmt: skip
_AGAINST_HEAD = (
    "models a minute", "first call", "later", PLAIN, CORES, FUNC, JAX, "JAX but for compiling",
    "÷ one at a time", "÷ packs of others", "test loss, in the same order", "n",
)  # fmt: skip
AGAINST = ("series", "tabular", "halves", "MLP rates", "CNN rates")
COUNTED = {"series": "GRUs of 32 units", "tabular": "MLPs 20-64-64-2", "CNN rates": "CNNs of two convolutions"}
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tabular": ("8 folds of 4 seeds, MLP 20-64-64-2, b = 32", ("many", PLAIN, CORES)),
    "halves": ("64 half-subsets of MNIST, MLP 784-64-10, b = 32", ("many", PLAIN, CORES)),
    "series": ("16 GRUs of 32 units, a series each, b = 16", ("many", PLAIN, CORES)),
    "widths": ("the 32 MLPs of folds, of 64, 56 and 48 units", ("many", BY_WIDTH, PLAIN)),
    "far widths": ("the same of 64, 48 and 32 units", ("many", BY_WIDTH, PLAIN)),
    "GRU widths": ("the 16 GRUs, of 32, 28 and 24 units", ("many", BY_WIDTH, PLAIN)),
    "GRU far widths": ("the same of 32, 24 and 16 units", ("many", BY_WIDTH, PLAIN)),
    "adapters": ("16 LoRA adapters of rank 8, BERT of 11 M, 32 tokens, b = 2", ("many", PLAIN, CORES)),
    "probes": ("16 linear layers on one frozen ResNet-18, b = 16", ("many", PLAIN, CORES)),
    "MLP rates": ("8 rates of 4 seeds, MLP 784-64-10, b = 32", ("many", PLAIN, CORES)),
    "CNN rates": ("4 rates of 4 seeds, CNN of two convolutions on MNIST, b = 32", ("many", PLAIN, CORES)),
    "shared": ("16 MLPs 784-64-10, the same batches", ("many",)),
    "own": ("16 MLPs 784-64-10, an order each", ("many",)),
    "32": ("32 rows, MLP 16-16-1, b = 16", ("many",)),
    "256": ("256 rows, MLP 16-16-1, b = 16", ("many",)),
    "1024": ("1,024 rows, MLP 16-16-1, b = 16", ("many",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there")
    add = parser.add_argument
    add("--tasks", choices=TASKS, nargs="+", help="default: all, with opponents those that these can do")
    add("--opponents", action="store_true", help="torch.func and JAX, too")
    add("--counts", type=count, nargs="+", metavar="K", help="training alone of so many models, by all sides")
    add("--repetitions", type=count, default=3, help="of every side, in turns (default %(default)s)")
    add("--busy", type=int, default=0, help="programs that compute beside all the time (default %(default)s)")
    add("--quick", action="store_true", help="twenty times less data, one epoch: that it runs, no more")
    given = parser.parse_args(argv)
    if given.counts:
        if unknown := set(given.tasks or ()) - set(COUNTED):
            parser.error(f"--counts has no {', '.join(sorted(unknown))}; it has {', '.join(COUNTED)}")
        return measure_and_write(parser, argv, measure_counts, counts_text)
    return measure_and_write(parser, argv, measure, opponents_text if given.opponents else result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Each side in processes of its own, in turns; the first call of `many` measures its packs, and is kept apart."""
    runs: list[dict[str, Any]] = []
    others = (FUNC, JAX) if given.opponents else ()
    tasks = given.tasks or (AGAINST if given.opponents else [*TASKS])
    places = [(task, side) for task in tasks for side in (*TASKS[task][1], *others)]
    with beside(given.busy):
        _repeat(given, places, runs)
    return {"kind": OPPONENTS if given.opponents else "", "runs": runs, "busy": given.busy}


@contextmanager
def beside(number: int) -> Iterator[None]:
    """Have programs compute beside the block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def _repeat(given: argparse.Namespace, places: Sequence[tuple[str, str]], runs: list[dict[str, Any]]) -> None:
    for repetition in range(-1, given.repetitions):
        for task, side in places:
            threads: tuple[str, ...] = ("",)
            if side == PLAIN:
                threads = ("1",) if given.busy else ("1", "2")  # two that wait for each other take minutes then
            if repetition < 0 and side not in ("many", BY_WIDTH):
                continue
            for own in threads:
                facts = {"task": task, "side": side, "threads": own, "first": repetition < 0}
                words = ["--quick"] * given.quick + ["--few"] * (given.opponents and side in (PLAIN, CORES))
                found = facts | {"load_before": os.getloadavg()[0]} | _job(task, side, own, words)
                runs.append(found)
                print(f"{task} {side} {own}: {found.get('seconds', 0):.1f} s", file=sys.stderr)


def _job(task: str, side: str, threads: str, others: Sequence[str]) -> dict[str, Any]:
    words = [sys.executable, str(_JOBS), task, side, *([threads] if threads else []), *others]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and side not in (FUNC, JAX):
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        return {"missing": done.stderr.strip().splitlines()[-1]}
    notes = [line for line in done.stderr.splitlines() if "run in packs" in line or "one at a time" in line]
    return {**json.loads(done.stdout.splitlines()[-1]), "notes": notes}


def measure_counts(given: argparse.Namespace) -> dict[str, Any]:
    """Training alone of more and more models; what does not grow with their number is measured with a few of them."""
    runs: list[dict[str, Any]] = []
    for _ in range(given.repetitions):
        for task in given.tasks or COUNTED:
            alone = [(PLAIN, "1", 0), (PLAIN, "2", 0), (CORES, "", 0)]
            failed: set[str] = set()
            for side, threads, models in alone + [(own, "", k) for k in given.counts for own in ("many", FUNC, JAX)]:
                if side in failed:
                    continue
                words = ["--quick"] * given.quick + [f"--count={models}", *(["--few"] if not models else [])]
                found = {"task": task, "side": side, "threads": threads, "count": models, "first": False}
                runs.append(found | {"load_before": os.getloadavg()[0]} | _job(task, side, threads, words))
                failed |= {side} if "missing" in runs[-1] else set()
                print(f"{task} {side} {models}: {rate_of(runs[-1]):.0f} models a minute", file=sys.stderr)
    return {"kind": COUNTS, "runs": runs, "quick": given.quick}


def rate_of(run: Result) -> float:
    """Models a minute by the rate of training; 0 if it is unknown."""
    return 60 * run["images_per_s"] / run["samples"] if "samples" in run else 0.0


def rates_by_count(runs: Sequence[Result], task: str, side: str) -> dict[int, list[float]]:
    """Models a minute of each run, by the number of models; 0 for any number, with the better number of threads."""
    found: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        if (run["task"], run["side"]) == (task, side) and "samples" in run:
            found.setdefault((run["count"], run["threads"]), []).append(rate_of(run))
    best: dict[int, list[float]] = {}
    for (models, _), rates in found.items():
        best[models] = max(best.get(models, [0.0]), rates, key=median)
    return best


def counts_text(result: Result) -> str:
    """Models a minute of training alone: medians."""
    counts = sorted({run["count"] for run in result["runs"]} - {0})
    rows, missing = [], dict[str, str]()
    for task in dict.fromkeys(run["task"] for run in result["runs"]):
        for side in (PLAIN, CORES, FUNC, JAX, "many"):
            rates = rates_by_count(result["runs"], task, side)
            cells = [f"{median(rates[k]):,.0f}" if k in rates else NONE for k in counts] if 0 not in rates else []
            cells = cells or [f"{median(rates[0]):,.0f}"] * len(counts)
            ours = "crossbow_py" if side == "many" else side
            rows.append([COUNTED[task], ours, *cells, str(max(map(len, rates.values()), default=0))])
            missing |= {f"{side}, {COUNTED[task]}": run["missing"] for run in result["runs"]
                        if "missing" in run and (run["task"], run["side"]) == (task, side)}  # fmt: skip
    head = ("models a minute, training alone", "", *(f"K = {k}" for k in counts), "n")
    notes = [f"- {side}: {reason}" for side, reason in missing.items()]
    return "\n\n".join([markdown_table(head, rows), *(["\n".join(notes)] if notes else [])])


def seconds(result: Result, task: str, side: str) -> float | None:
    """The median of the whole job, for the plain loop with the better number of threads."""
    by_threads: dict[str, list[float]] = {}
    for run in result["runs"]:
        if (run["task"], run["side"], run["first"]) == (task, side, False) and "seconds" in run:
            by_threads.setdefault(run["threads"], []).append(run["seconds"])
    return min((median(own) for own in by_threads.values()), default=None)


def images_per_s(runs: Sequence[Result], side: str) -> float:
    """The median rate of training, for the plain loop with the better number of threads; 0 where it is unknown."""
    by_threads: dict[str, list[float]] = {}
    for run in runs:
        if run["side"] == side and not run["first"]:
            by_threads.setdefault(run["threads"], []).append(run["images_per_s"])
    return max((median(own) for own in by_threads.values()), default=0.0)


def result_text(result: Result) -> str:
    rows = []
    for task in dict.fromkeys(run["task"] for run in result["runs"]):
        own = [run for run in result["runs"] if run["task"] == task]
        first = next(run for run in own if run["first"] and run["side"] == "many")
        many = seconds(result, task, "many")
        assert many is not None, "every task has it"
        ratios = [seconds(result, task, side) for side in (PLAIN, CORES, BY_WIDTH)]
        rate = median(run["images_per_s"] for run in own if run["side"] == "many" and not run["first"])
        losses = [next((f"{run['test_loss']:.4f}" for run in own if run["side"] == side), NONE) for side in _TOLD]
        cells = [f"{first['seconds']:.1f}", f"{many:.1f}"]
        cells += [NONE if each is None else f"{each / many:.2f}" for each in ratios]
        others = [images_per_s(own, side) for side in (PLAIN, CORES)]
        ratio = " · ".join(f"{rate / each:.2f}" if each else NONE for each in others)
        cells += [f"{60 * first['models'] / many:,.0f}", f"{rate:,.0f}", ratio, " · ".join(losses)]
        rows.append([TASKS[task][0], *cells, str(sum(run["side"] == "many" and not run["first"] for run in own))])
    return markdown_table(_HEAD, rows)


def opponents_rows(result: Result) -> list[list[str]]:
    """Models a minute of all sides, and ours ÷ the best of one model at a time and of others' packs."""
    rows = []
    for task in dict.fromkeys(run["task"] for run in result["runs"]):
        own = [run for run in result["runs"] if run["task"] == task]
        models = next(run["models"] for run in own if "models" in run)
        first = next(run["seconds"] for run in own if run["first"])
        took = {side: seconds(result, task, side) for side in ("many", PLAIN, CORES, FUNC, JAX)}
        compiled = [run["seconds"] - run["compiling"] for run in own if "compiling" in run]
        took["compiled"] = median(compiled) if compiled else None
        rates = [NONE if each is None else f"{60 * models / each:,.0f}" for each in (first, *took.values())]
        many = took["many"]
        assert many is not None, "every task has it"
        for sides in ((PLAIN, CORES), (FUNC, JAX)):
            others = [each for side in sides if (each := took[side]) is not None]
            rates.append(f"{min(others) / many:.2f}" if others else NONE)
        told = [run for run in own if "test_loss" in run]
        losses = {side: [run["test_loss"] for run in told if run["side"] == side] for side in took}
        rates.append(" · ".join(f"{median(each):.3f}" for each in losses.values() if each))
        rows.append([TASKS[task][0], *rates, str(sum(run["side"] == "many" and not run["first"] for run in own))])
    return rows


def opponents_text(result: Result) -> str:
    missing = {run["side"]: run["missing"] for run in result["runs"] if "missing" in run}
    found: Mapping[str, str] = next((run["versions"] for run in result["runs"] if "versions" in run), {})
    notes = [f"- {side}: {reason}" for side, reason in missing.items()]
    notes += [f"- {JAX}: {', '.join(f'{name} {number}' for name, number in found.items())}"] if found else []
    table = markdown_table(_AGAINST_HEAD, opponents_rows(result))
    return "\n\n".join([table, *(["\n".join(notes)] if notes else [])])


def models_a_minute(results: Mapping[str, Result]) -> list[list[str]]:
    """Rows of the first page: ours, the best of one model at a time, and the best of others' packs."""
    (result,) = (each for each in results.values() if each.get("kind") == OPPONENTS)
    rows = []
    for row in opponents_rows(result):
        by_name = dict(zip(_AGAINST_HEAD, row, strict=True))
        cells = []
        for sides in ((PLAIN, CORES), (FUNC, JAX)):
            there = {side: by_name[side] for side in sides if by_name[side] != NONE}
            best = max(there, key=lambda side: int(there[side].replace(",", "")), default="")
            cells.append(f"{there[best]} ({best})" if best else NONE)
        rows.append([f"[{row[0]}](experiments/many_models/README.md)", by_name["later"], *cells, by_name["n"]])
    return rows


MODELS_A_MINUTE = models_a_minute
TABLES = {"all": result_text}
TABLES_OF_KIND = {
    tokens.KIND: {"all": tokens.result_text},
    OPPONENTS: {"all": opponents_text},
    COUNTS: {"all": counts_text},
}

if __name__ == "__main__":
    raise SystemExit(main())
