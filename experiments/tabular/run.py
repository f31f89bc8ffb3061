"""Tables by packs of small MLPs from one call, and by what people would take instead, each by its authors' code.

    python experiments/tabular/run.py [--data NAME ...] [--tabpack CLONE] [--repetitions N] [--full] [--json PATH]

README.md says what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import numpy as np
from numpy.typing import NDArray

from crossbow_py.core.intervals import estimate
from experiments.bench.environments import MissingError, python_of, versions
from experiments.bench.machine import ROOT, usable_cores
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.tables.markdown import NONE, markdown_table

Array = NDArray[Any]
DATA = {"churn": ("log_loss", "auc", "accuracy"), "diamonds": ("rmse",)}  # the first is what all sides go by
NAMES = {"log_loss": "log loss", "auc": "AUC", "accuracy": "accuracy", "rmse": "RMSE of log price"}
BASE = "crossbow_py, 16"
CLONE = "git clone https://github.com/yandex-research/tabpack, and in it: uv sync; then --tabpack with its path"
_ROWS = 20_000
_FOLDER = Path(__file__).parent
Side = tuple[str, str, Mapping[str, Any]]  # its name, a module beside this file that fits a table, options for it


def sides(table: str, full: bool, quick: bool) -> list[Side]:
    """Return all sides of a table, in the order of the rows."""
    ours, epochs = (1, 1) if quick else {"churn": (12, 32), "diamonds": (16, 10)}[table]
    models = 2 if quick else 8
    tabm = {"epochs": 1000, "width": 512} if full else {"epochs": epochs, "width": 128}
    tabpack = {"width": 384} if full else {"width": 128, "timeout_s": 3 if quick else 40}
    return [
        *((f"crossbow_py, {n}", "packs", {"models": n, "epochs": ours, "width": 64})
          for n in ((1, 16) if quick else (1, 16, 64))),
        (f"RealMLP, {models}", "realmlp", {"models": models, "epochs": 256 if full else epochs}),
        ("TabM, 32", "tabm_loop", {**tabm, "models": 32}),
        *((f"scikit-learn, {n}", "scikit", {"models": n}) for n in (1, models)),
        ("TabPack, 64", "tabpack_clone", {**tabpack, "models": 64}),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, written="write the results there")
    add = parser.add_argument
    add("--data", choices=DATA, nargs="+", default=[*DATA], help="default: all")
    add("--tabpack", type=Path, metavar="CLONE", help=f"{CLONE}; left out without")
    add("--repetitions", type=count, default=3, help="of all sides, in turns, of other splits (default %(default)s)")
    add("--full", action="store_true", help="other libraries with the sizes and epochs of their defaults: hours")
    add("--quick", action="store_true", help="few rows, models and epochs")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All sides in turns; the first call of each of ours measures packs, and is kept apart."""
    runs: list[dict[str, Any]] = []
    try:
        python, found = python_of("tabular"), versions("tabular")
    except MissingError as error:  # then there are no data either
        return {"full": given.full, "runs": runs, "versions": {}, "missing": str(error)}
    for repetition in range(-1, given.repetitions):
        for table in given.data:
            with tempfile.TemporaryDirectory() as folder:
                path, seed = Path(folder) / "data.npz", max(repetition, 0)
                rows = 400 if given.quick else _ROWS
                words = [str(python), str(_FOLDER / "prepare.py"), table, str(seed), str(rows), str(path)]
                subprocess.run(words, check=True)
                for side in sides(table, given.full, given.quick):
                    if repetition < 0 and side[1] != "packs":
                        continue
                    its = one(side, path, seed, given.tabpack)
                    runs.append({"table": table, "side": side[0], "repetition": repetition, **its})
                    print(f"{table}, {side[0]}: {its.get('missing') or its['seconds']}", file=sys.stderr)
    return {"full": given.full, "runs": runs, "versions": found, "missing": ""}


def one(side: Side, path: Path, seed: int, clone: Path | None) -> dict[str, Any]:
    """Fit once in a process of its own; returns its seconds, memory and metrics, or why they are missing."""
    _, module, options = side
    out, cores = path.with_name("out.npz"), usable_cores()
    python, folder = Path(sys.executable) if module == "packs" else python_of("tabular"), ROOT
    if module == "tabpack_clone":
        if clone is None or not (python := clone.resolve() / ".venv" / "bin" / "python").exists():
            return {"missing": CLONE}
        folder = clone  # which it asks for
    words = [str(python), str(_FOLDER / "side.py"), module, str(path), str(out)]
    words.append(json.dumps({**options, "seed": seed, "threads": cores}))
    # Threads are set by options; joblib leaves a process one of them, unless a variable says another number.
    environment = {name: own for name, own in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment |= {"PYTHONPATH": str(ROOT)} if module == "packs" else {}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"missing": (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "metrics" not in told:
        with np.load(path) as data, np.load(out) as predicted:
            told["seconds"] += 0 if module == "realmlp" else float(data["seconds"])
            told["metrics"] = metrics(predicted["predictions"], data["test_y"], float(data["std"]))
    return told


def metrics(predicted: Array, y: Array, std: float) -> dict[str, float]:
    """Return what predictions have on test samples: RMSE in the targets' unit, or log loss, AUC and accuracy."""
    if predicted.ndim == 1:
        return {"rmse": std * float(np.sqrt(np.mean((predicted - y) ** 2)))}
    ones, zeros = (np.sort(predicted[y == own, 1]) for own in (1, 0))
    below = [np.searchsorted(zeros, ones, side).mean() / len(zeros) for side in ("left", "right")]
    log_loss = -np.log(predicted[np.arange(len(y)), y].clip(min=1e-15)).mean()
    return {"log_loss": float(log_loss), "auc": float(np.mean(below)),
            "accuracy": float((predicted.argmax(1) == y).mean())}  # fmt: skip


def result_text(result: Mapping[str, Any]) -> str:
    tables = dict.fromkeys(run["table"] for run in result["runs"])
    missing = {run["side"]: run["missing"] for run in result["runs"] if "missing" in run}
    notes = [f"- {side} is missing: {why}" for side, why in missing.items()]
    found = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    notes.append(f"- {found or 'all is missing: ' + result['missing']}")
    return "\n\n".join([*(f"**{table}**\n\n{table_text(result, table)}" for table in tables), "\n".join(notes)])


def table_text(result: Mapping[str, Any], table: str) -> str:
    """A row a side: means of metrics, and medians of seconds and memory."""
    own = [run for run in result["runs"] if run["table"] == table]
    first = {run["side"]: f"{run['seconds']:.1f}" for run in own if run["repetition"] < 0 and "seconds" in run}
    by_side: dict[str, list[Mapping[str, Any]]] = {run["side"]: [] for run in own}
    for run in own:
        if run["repetition"] >= 0 and "seconds" in run:
            by_side[run["side"]].append(run)
    base = {run["repetition"]: run for run in by_side[BASE]}
    names, rows = DATA[table], []
    for side, runs in by_side.items():
        pairs = [(run, base[run["repetition"]]) for run in runs if run["repetition"] in base]
        worse = estimate([run["metrics"][names[0]] - other["metrics"][names[0]] for run, other in pairs])
        cells = [f"{mean(run['metrics'][name] for run in runs):.4f}" if runs else NONE for name in names]
        cells += [NONE if worse is None or side == BASE else str(worse)]
        cells += [f"{median(run['seconds'] for run in runs):.1f}" if runs else NONE, first.get(side, NONE)]
        cells += [f"{median(run['seconds'] / other['seconds'] for run, other in pairs):.2f}" if pairs else NONE]
        cells += [f"{median(run['peak_mib'] for run in runs):,.0f}" if runs else NONE]
        rows.append([side, *cells, str(len(runs))])
    shown = [NAMES[name] for name in names]
    head = ("", *shown, f"{shown[0]} − that of 16", "seconds", "first call, s", "÷ 16", "memory, MiB", "n")
    return markdown_table(head, rows)


TABLES = {"all": result_text}

if __name__ == "__main__":
    raise SystemExit(main())
