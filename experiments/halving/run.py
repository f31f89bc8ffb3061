"""Successive halving over configurations of an MLP by four programs: models a minute, and how good the best is.

    python experiments/halving/run.py [--quick] [--repetitions N] [--json PATH]

README.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import optuna
import torch
from torch import Tensor

from crossbow_py import Search
from crossbow_py.data.sources import SOURCES
from crossbow_py.search.events import SearchListener, TrialRecord
from crossbow_py.search.study.sampling import Sampling
from experiments.bench.environments import MissingError, python_of, versions
from experiments.bench.machine import ROOT, usable_cores
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.windows import by_turns, spread
from experiments.halving.job import JOB, MLP, VALUES, read
from experiments.tables.markdown import NONE, markdown_table, spread_text

OURS, SKLEARN = "crossbow_py", "sklearn"
NAMES = {OURS: "crossbow_py", "optuna": "Optuna", "ray": "Ray Tune", SKLEARN: "scikit-learn with skorch"}
SPACE = {
    "optimizer.learning_rate": {"low": 0.001, "high": 0.5, "log": True},
    "optimizer.momentum": {"low": 0.5, "high": 0.99},
    "optimizer.weight_decay": {"low": 1e-6, "high": 1e-2, "log": True},
    "label_smoothing": {"low": 0.0, "high": 0.2},
    "model.dropout": {"low": 0.05, "high": 0.5},
}
# By whether it is quick: configurations, rungs, images to train on.
_SIZES = {False: (64, (1, 4, 16), 6000), True: (4, (1, 4), 96)}
_FIXED = {"space": SPACE, "eta": 4, "batch_size": 32, "cores": usable_cores()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a search of a second, to see that it runs")
    parser.add_argument("--repetitions", type=count, default=3, help="searches by each side (default %(default)s)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All sides in turns, each in a process of its own; every repetition has other configurations."""
    number, rungs, images = _SIZES[given.quick]
    common = {**_FIXED, **_data(images), "rungs": rungs, "number": number}
    # The first search measures how wide packs pay, which is remembered.
    _search(OURS, common | {"seed": 999})
    runs = list[dict[str, Any]]()
    for turn, side in enumerate(by_turns(list(NAMES), given.repetitions)):
        repetition = turn // len(NAMES)
        run = {"side": side, "repetition": repetition, **_search(side, common | {"seed": 1000 * repetition})}
        runs.append(run)
        print(f"{NAMES[side]}: {run.get('missing') or run['seconds']}", file=sys.stderr)
    try:
        found = versions("search")
    except MissingError:
        found = {}
    return {"configurations": number, "rungs": rungs, "images": images, "runs": runs, "versions": found}


def _data(images: int) -> dict[str, tuple[Tensor, Tensor]]:
    source = SOURCES["mnist"]().load(progress=False)
    parts = {
        "train": (source.train, slice(images)), "validation": (source.train, slice(images, images + images // 4)),
        "test": (source.test, slice(None)),
    }  # fmt: skip
    return {part: (pair[0][own].flatten(1).float() / 255, pair[1][own].long()) for part, (pair, own) in parts.items()}


def _search(side: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a side did; why it is missing where it is, or has failed."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save({**job, "configurations": configurations(job)}, Path(folder) / JOB)
        if side == OURS:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                return pool.submit(_ours, folder).result()
        try:
            words = [str(python_of("search")), "-m", f"experiments.halving.{side}_side", folder]
        except MissingError as error:
            return {"missing": str(error)}
        own = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0"}
        done = subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"missing": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
        said = json.loads(done.stdout.splitlines()[-1])
        lines = [json.loads(line) for line in (Path(folder) / VALUES).read_text().splitlines()]
    return {"seconds": round(said["seconds"], 2), **outcome(lines, job, said["begun"], continues=side != SKLEARN)}


def outcome(lines: Sequence[Any], job: Mapping[str, Any], begun: float, *, continues: bool) -> dict[str, Any]:
    """Return the samples that were trained on, the best trial, and all values with their seconds, of noted lines."""
    spans = {end: end - before if continues else end for before, end in pairwise((0, *job["rungs"]))}
    samples = sum(spans[line["epochs"]] for line in lines) * len(job["train"][1])
    best = max((line for line in lines if line["test"] is not None), key=lambda line: line["value"])
    values = [(round(line["at"] - begun, 2), line["value"]) for line in lines]
    return {"samples": samples, "value": best["value"], "test_accuracy": best["test"], "values": values}


# --- crossbow_py ------------------------------------------------------------------------------------------------------


class _Values(SearchListener):
    def __init__(self) -> None:
        self.begun_s, self.values = time.perf_counter(), list[tuple[float, float]]()

    def on_trials(self, trials: tuple[TrialRecord, ...]) -> None:
        best = max((value for trial in trials for value in trial.values.values()), default=0.0)
        self.values.append((round(time.perf_counter() - self.begun_s, 2), round(best, 4)))


def _ours(folder: str) -> dict[str, Any]:
    job = read(folder)
    import_module("crossbow_py.search.build")  # what others have imported, too
    values = _Values()
    found = new_search(job, values).run()
    seconds, summary = time.perf_counter() - values.begun_s, found.summary
    assert found.params in job["configurations"], "all sides have the same"
    return {
        "seconds": round(seconds, 2), "samples": summary.samples, "value": round(found.value or 0.0, 4),
        "test_accuracy": round(found.test_accuracy or 0.0, 4), "values": values.values,
        "training_s": round(summary.train_time_s, 2), "overhead_s": round(summary.overhead_time_s, 2),
        "notes": summary.notes,
    }  # fmt: skip


def new_search(job: Mapping[str, Any], *listeners: SearchListener) -> Search:
    """Return the search as a user writes it; a bracket has as many trials as its last rung has epochs."""
    return Search(
        MLP, job["train"], job["test"], validation_data=job["validation"], space=job["space"], optimizer="sgd",
        num_trials=job["number"], method="successive_halving", min_epochs=1, max_epochs=job["rungs"][-1],
        eta=job["eta"], batch_size=job["batch_size"], seed=job["seed"], precision="fp32", listeners=listeners,
    )  # fmt: skip


def configurations(job: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return what our search samples, which the other sides are given."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    config = new_search(job).config
    sampling = Sampling(config.parsed_space, config.sampler, config.seed, maximize=True)
    found = [sampling.sampled(trial, ()).params for trial in range(job["number"])]
    return [{key.replace("model.args.", "model."): own for key, own in each.items()} for each in found]


# --- tables -----------------------------------------------------------------------------------------------------------


def result_text(result: Mapping[str, Any]) -> str:
    runs, models = [run for run in result["runs"] if "missing" not in run], result["configurations"]
    by_side = {side: {run["repetition"]: run for run in runs if run["side"] == side} for side in NAMES}
    rows = [[name, *(cells(by_side, side, models) or [NONE] * 8)] for side, name in NAMES.items()]
    head = ("", "seconds", "models a minute", "images/s", "time ÷ crossbow_py's", "seconds to equal accuracy",
            "validation accuracy of the best", "its test accuracy", "n")  # fmt: skip
    missing = {run["side"]: run["missing"] for run in result["runs"] if "missing" in run}
    notes = [f"{NAMES[side]} is missing: {reason}" for side, reason in missing.items()]
    if starts := [run["values"][0][0] for run in by_side["ray"].values()]:
        notes.append(f"Ray Tune measured its first trial after {median(starts):.1f} s.")
    found = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return "\n\n".join([markdown_table(head, rows), *notes, *([found] if found else [])])


def cells(by_side: Mapping[str, Mapping[int, Any]], side: str, models: int) -> list[str]:
    """Return a side's row; equal accuracy is that of the side whose best is the least, within a repetition."""
    own, ours = by_side[side], by_side[OURS]
    if not own:
        return []
    reached = []
    for repetition, run in own.items():
        least = min(other[repetition]["value"] for other in by_side.values() if repetition in other)
        reached.append(min(at for at, value in run["values"] if value >= least))
    seconds = [run["seconds"] for run in own.values()]
    ratio = median(run["seconds"] / ours[repetition]["seconds"] for repetition, run in own.items())
    value, test = (median(run[key] for run in own.values()) for key in ("value", "test_accuracy"))
    pace = median(run["samples"] / run["seconds"] for run in own.values())
    return [spread_text(spread(seconds), ".1f"), f"{60 * models / median(seconds):,.0f}", f"{pace:,.0f}",
            f"{ratio:.2f}", f"{median(reached):.1f}", f"{value:.4f}", f"{test:.4f}", str(len(own))]  # fmt: skip


def models_a_minute(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The row of the first page."""
    rows = []
    for result in results.values():
        rates = {}
        for side, name in NAMES.items():
            if own := [run["seconds"] for run in result["runs"] if run["side"] == side and "seconds" in run]:
                rates[name] = 60 * result["configurations"] / median(own), len(own)
        ours, n = rates.pop(NAMES[OURS])
        best = max(rates, key=lambda name: rates[name]) if rates else None
        theirs = NONE if best is None else f"{rates[best][0]:,.0f} ({best})"
        what = f"{result['configurations']} configurations of an MLP 784-128-64-10 by successive halving, b = 32"
        rows.append([f"[{what}](experiments/halving/README.md)", f"{ours:,.0f}", theirs, NONE, str(n)])
    return rows


TABLES = {"all": result_text}
MODELS_A_MINUTE = models_a_minute

if __name__ == "__main__":
    raise SystemExit(main())
