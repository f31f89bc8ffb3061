"""Runs the cells of a grid, each in a process of its own, and collects what they recorded into a results file.

A cell that is done is recorded at once in a file beside its run's folder, and not run again as long as its overrides
stay the same; one that was stopped in any way goes on from its newest checkpoint when the same command is given again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from crossbow_py.cli.command_line import say
from crossbow_py.core.host import LoadSnapshot, foreign_share
from crossbow_py.telemetry.records import METRICS_FILE, read_metrics, read_summary
from crossbow_py.train.checkpoints.checkpoint import FOLDER as CHECKPOINTS_FOLDER
from experiments.bench.machine import ROOT, machine
from experiments.bench.program import count, seeds
from experiments.bench.results import read_result, results_folder, write_result
from experiments.bench.windows import load_with_ended
from experiments.grids.grid import Cell, Grid, chosen, in_turns, read_grids
from experiments.grids.report import first_at

_INTERRUPTED = 130
MEASURED_FILE = "measured.jsonl"  # in a run's folder: what the program of a cell measures beside, a line an evaluation
_RECORDS = (METRICS_FILE, MEASURED_FILE)
_POLL_S = 0.1
_DIVERGED = "non_finite"
_TERMINATED = 143
_KEPT_OF_SUMMARY = (
    "device", "executor", "precision", "num_learners", "batch_size", "epochs", "samples_seen", "test_accuracy",
    "best_test_accuracy", "train_time_s",
)  # fmt: skip
_KEPT_OF_EPOCH = ("epoch", "samples_seen", "elapsed_s", "test_accuracy")
_KEPT_OF_LEARNING = ("learning", "spread")  # where learning_statistics=true measured them
_KEPT_OF_EMA = ("z_accuracy",)  # where an EMA of z is evaluated
_KEPT_OF_MACHINE = ("cpu", "cores", "gpus", "torch", "date", "commit")


@dataclass(frozen=True)
class Places:
    """The folders of an experiment's runs and of its results files."""

    runs: Path
    results: Path

    def of(self, grid: Grid, cell: Cell) -> Path:
        """The folder of a cell's runs and records: that of the same settings by an earlier name, where there is one."""
        folder = self.runs / grid.name
        return min(folder.glob(f"*-{cell.key}"), default=folder / cell.folder)


@dataclass
class _Job:
    cell: Cell
    seed: int
    folder: Path
    process: subprocess.Popen[bytes]
    begun: LoadSnapshot
    alone: bool

    @property
    def record(self) -> Path:
        return record_path(self.folder, self.seed)

    @property
    def run(self) -> Path:
        return self.folder / f"seed-{self.seed}"


def record_path(folder: Path, seed: int) -> Path:
    """The file that says that a cell is done with a seed, and what came of it."""
    return folder / f"seed-{seed}.json"


def run_cells(grid: Grid, turns: Sequence[tuple[Cell, int]], places: Places, jobs: int) -> list[str]:
    """Run what is not done, `jobs` at a time; returns which of them failed.

    With several at a time torch has one thread in each. Left by an exception, it stops what is running, each with a
    checkpoint.
    """
    waiting = [(cell, seed) for cell, seed in turns if _record(cell, seed, places.of(grid, cell)) is None]
    print(f"{grid.name}: {len(turns) - len(waiting)} of {len(turns)} runs are done", flush=True)
    failed: list[str] = []
    running: list[_Job] = []
    with _terminated_like_interrupted():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell, seed = waiting.pop(0)
                    running.append(_start(cell, seed, places.of(grid, cell), alone=jobs == 1))
                time.sleep(_POLL_S)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    failed += _finish(job, left=len(waiting) + len(running))
        finally:
            for job in running:
                job.process.terminate()
            for job in running:
                job.process.wait()
    return failed


def add_recorded(grid: Grid, places: Places, result: Mapping[str, Any]) -> None:
    """Take as done the runs of a result whose settings are those of a cell."""
    runs = [{**run, "settings": f"{result['settings']} {run['settings']}"} for run in result["runs"]]
    for cell, run in ((cell, run) for cell in grid.cells for run in runs if cell.is_of(run)):
        folder = places.of(grid, cell)
        if _record(cell, run["seed"], folder) is None:
            write_result(record_path(folder, run["seed"]), run)


def _record(cell: Cell, seed: int, folder: Path) -> dict[str, Any] | None:
    """The record of a run; None where there is none, or where a default has changed since."""
    path = record_path(folder, seed)
    record = read_result(path) if path.exists() else None
    return record if record and cell.is_of(record) else None


def _start(cell: Cell, seed: int, folder: Path, alone: bool) -> _Job:
    if record_path(folder, seed).exists():  # of other settings than those of today
        record_path(folder, seed).unlink()
        shutil.rmtree(folder / f"seed-{seed}", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **({} if alone else {"OMP_NUM_THREADS": "1"})}
    with (folder / f"seed-{seed}.txt").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *cell.command(seed, str(folder / f"seed-{seed}"))],
            stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
    return _Job(cell, seed, folder, process, load_with_ended(), alone)


def _finish(job: _Job, left: int) -> list[str]:
    name, code = f"{job.cell.name}, seed {job.seed}", job.process.returncode
    record = recorded(job.cell, job.seed, job.run) if job.run.is_dir() else None
    if record is None or (code and record["status"] != "failed"):
        said = (job.folder / f"seed-{job.seed}.txt").read_text(errors="replace").strip().splitlines()
        print(f"{name} ended with exit code {code}: {said[-1] if said else 'it said nothing'}", flush=True)
        return [name]
    share = foreign_share(job.begun, load_with_ended()) if job.alone else None
    record |= {"alone": job.alone, "foreign_share": None if share is None else round(share, 3)}
    write_result(job.record, record)
    shutil.rmtree(job.run / CHECKPOINTS_FOLDER, ignore_errors=True)
    accuracy = record["summary"]["test_accuracy"]
    outcome = "diverged" if accuracy is None else f"test accuracy {accuracy:.4f}"
    print(f"{name}: {outcome}, {record['summary']['train_time_s']:.0f} s of training; {left} left", flush=True)
    return []


def recorded(cell: Cell, seed: int, run: Path) -> dict[str, Any] | None:
    """A run that is over as plain values; None for one that is not. One that diverged is over."""
    summary = read_summary(run)
    status = summary.get("status")
    if status not in ("finished", "target_reached") and summary.get("stop_reason") != _DIVERGED:
        return None
    epochs, measured = (read_metrics(run / name) if (run / name).exists() else [] for name in _RECORDS)
    facts = machine()
    return {
        "cell": cell.name,
        "labels": _labels(cell),
        "seed": seed,
        "program": cell.program,
        "parts": cell.parts,
        "settings": cell.settings,
        "status": status,
        "machine": {key: facts[key] for key in _KEPT_OF_MACHINE},
        "summary": {key: summary[key] for key in (*_KEPT_OF_SUMMARY, *_of_text(summary))},
        "epochs": [_kept(record) for record in epochs],
        **({"measured": measured} if measured else {}),
    }


def _labels(cell: Cell) -> dict[str, str]:
    return {} if cell.side is None else {"side": cell.side}


def _of_text(summary: Mapping[str, Any]) -> tuple[str, ...]:
    return () if summary.get("tokens_per_s") is None else ("tokens_per_s",)


def _kept(record: Mapping[str, Any]) -> dict[str, Any]:
    keys = _KEPT_OF_EPOCH + (_KEPT_OF_LEARNING if record.get("learning") else ())
    keys += () if record.get("z_accuracy") is None else _KEPT_OF_EMA
    return {key: record[key] for key in keys}


def collect(grid: Grid, places: Places, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The result of all runs that are done, whenever that was, with what the grid says of them now."""
    runs = [
        {**record, "cell": cell.name, "labels": _labels(cell)}
        for cell in grid.cells
        for path in sorted(places.of(grid, cell).glob("seed-*.json"))
        if cell.is_of(record := read_result(path))
    ]
    if not grid.curves:
        runs = [{**run, "epochs": ends_of(run, grid.targets)} for run in runs]
    shared, runs = _shared_settings(runs)
    return {
        "machine": dict(facts),
        "grid": grid.name,
        "title": grid.title,
        "targets": list(grid.targets),
        "reference": grid.reference,
        "shown_after": list(grid.shown_after),
        "num_cells": len(grid.cells),
        "settings": shared,
        "runs": runs,
    }


def ends_of(run: Mapping[str, Any], targets: Sequence[float]) -> list[dict[str, Any]]:
    """Return the evaluations at which targets were reached, and the last."""
    found = [record for target in targets if (record := first_at(run, target)) is not None]
    return [record for record in run["epochs"] if record in found or record is run["epochs"][-1]]


def _shared_settings(runs: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the settings that all runs have, and the runs with their other settings only."""
    words = [run["settings"].split() for run in runs]
    shared = [word for word in dict.fromkeys(chain(*words)) if all(word in own for own in words)]
    others = [" ".join(word for word in own if word not in shared) for own in words]
    return " ".join(shared), [{**run, "settings": own} for run, own in zip(runs, others, strict=True)]


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM leaves the block by SystemExit."""

    def leave(*_: object) -> None:
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(
    argv: Sequence[str] | None = None, read: Callable[[str], Mapping[str, Grid]] = read_grids
) -> int:
    """Run what is asked for of a question's grid and write its result; returns the exit code."""
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    try:
        grids = read(options.question)
        if options.grid not in grids:
            raise ValueError(f"GRID must be one of {', '.join(grids)}, got {options.grid!r}.")
        grid = grids[options.grid].with_overrides(options.overrides)
        cells = chosen(grid, options.cells)
    except ValueError as error:
        parser.error(str(error))
    if grid.alone and options.jobs > 1:
        parser.error(f"times matter in {grid.name}, so that its cells run one at a time; leave --jobs out.")
    turns, facts = in_turns(cells, options.seeds or grid.seeds), machine()
    if options.list:
        commands = [(cell, seed, shlex.join([cell.program, *cell.overrides, f"seed={seed}"])) for cell, seed in turns]
        return say("\n".join(f"{cell.name}, seed {seed}: python -m {words}" for cell, seed, words in commands))
    places = Places(options.runs / options.question, options.results or results_folder(options.question))
    path = places.results / f"{options.name or grid.name}.json"
    if options.add and path.exists():
        add_recorded(grid, places, read_result(path))
    try:
        failed = run_cells(grid, turns, places, options.jobs)
    except KeyboardInterrupt:
        print("interrupted; give the same command again to go on.")
        return _INTERRUPTED
    result = collect(grid, places, facts)
    if result["runs"]:
        write_result(path, result)
        print(f"written to {path}")
    if failed:
        print(f"{len(failed)} runs failed; give the same command again to run them.")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains the cells of a grid and writes QUESTION/results/GRID.json.")
    add = parser.add_argument
    add("question", help="a folder of experiments/ with grids")
    add("grid", help="which of its grids")
    add("--cells", default="*", metavar="PATTERN", help="only cells whose names match, as in 'sma*'")
    add("--seeds", type=seeds, metavar="0,1,...", help="one run of every cell each (default: the grid's)")
    add("--jobs", type=count, default=1, help="runs at a time, of one thread each if several; their times do not count")
    add("--list", action="store_true", help="only say what would be run, as commands")
    add("--add", action="store_true", help="runs of the results file with the same settings are done; run the others")
    add("--name", help="name of the results file (default: the grid's)")
    add("--runs", type=Path, default=ROOT / "runs", help="where run folders lie (default runs/ in the checkout)")
    add("--results", type=Path, help="where the results file lies (default: results/ of the question)")
    add("overrides", nargs="*", metavar="key=value", help="for every cell, as for crossbow_py.train")
    return parser
