"""Training runs of the command line's experiments, one a seed, recorded as one results file.

A folder of experiments says by `RecordedRuns` what it trains and to which accuracy. A run that was stopped (Ctrl-C,
SIGTERM, kill -9) goes on where its newest checkpoint stands when the same command is given again; the results file is
written when all runs are over.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.telemetry.records import CONFIG_FILE, METRICS_FILE, read_metrics, read_summary
from crossbow_py.train.__main__ import main as train
from experiments.bench.machine import ROOT, machine
from experiments.bench.results import results_folder, seeds, write_result
from experiments.grids.report import first_at
from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]
# Paths belong to the machine, and the wall time is that of the process that happened to end the run.
_LEFT_OUT = ("output_dir", "model_path", "resumed_from", "wall_time_s")


@dataclass(frozen=True)
class RecordedRuns:
    """The runs that a folder of experiments records, as plain values.

    Attributes:
        folder: its name in experiments/, and that of the folder of its runs.
        experiment: of the command line, when no other is asked for.
        target_accuracy: on the test data; tables say when it was reached, pictures show it.
        seeds: when no others are asked for.
        chance: accuracy of guessing, shown in pictures when given.
        shown_accuracy: from where to where pictures go.
    """

    folder: str
    experiment: str
    target_accuracy: float
    seeds: tuple[int, ...] = (0,)
    chance: float | None = None
    shown_accuracy: tuple[float, float] = (0.3, 1.0)


def record(recorded: RecordedRuns, argv: Sequence[str] | None = None) -> int:
    """Train (or go on training) every seed, then write the result; returns the exit code of the first that failed."""
    options = _parser(recorded).parse_args(argv)
    facts, runs, name = machine(), [], options.name or options.experiment
    for seed in options.seeds:
        folder = options.runs / recorded.folder / name / f"seed-{seed}"
        fixed = [f"+experiment={options.experiment}", f"seed={seed}", f"output_dir='{folder}'", "resume=auto"]
        code = train([*fixed, *options.overrides])
        if code:
            print(f"seed {seed} is not done; give the same command again to go on from its newest checkpoint.")
            return code
        runs.append(collect(folder))
    path = options.results / f"{name}.json"
    write_result(path, {"machine": facts, "n": len(runs), "runs": runs})
    print(f"written to {path}")
    return 0


def collect(folder: Path) -> dict[str, Any]:
    """A finished run as plain values: configuration, summary, and a record per epoch.

    `images_per_s`, `data_wait_share` and `num_workers` are those of the whole run, also when it was resumed; the last
    two are None for data that lived on the device.
    """
    summary, epochs = read_summary(folder), read_metrics(folder / METRICS_FILE)
    kept = {key: value for key, value in summary.items() if key not in _LEFT_OUT}
    kept["images_per_s"] = summary["samples_seen"] / summary["train_time_s"]
    kept["data_wait_share"] = wait_share(epochs)
    kept["num_workers"] = epochs[-1].get("num_workers")
    return {"summary": kept, "config": without_paths(read_yaml(folder / CONFIG_FILE)), "epochs": epochs}


def wait_share(epochs: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the training time spent waiting for data: the epochs' shares, weighted by how long each took."""
    waited_s = before_s = 0.0
    for epoch in epochs:
        share = epoch.get("data_wait_share")
        if share is None:
            return None
        waited_s += share * (epoch["elapsed_s"] - before_s)
        before_s = epoch["elapsed_s"]
    return waited_s / before_s


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what belongs to one machine; of a folder of images its name is left."""
    kept = {key: value for key, value in config.items() if key not in ("output_dir", "resume")}
    data = {key: value for key, value in config["data"].items() if key not in ("root", "cache_dir")}
    if Path(data.get("folder", "")).is_absolute():
        data["folder"] = Path(data["folder"]).name
    return {**kept, "data": data}


def _parser(recorded: RecordedRuns) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains an experiment, one run a seed, and writes results/NAME.json.")
    add, shown = parser.add_argument, ",".join(map(str, recorded.seeds))
    add("--experiment", default=recorded.experiment, help="of the command line (default %(default)s)")
    add("--name", help="name of the results file (default: the experiment's)")
    add("--seeds", type=seeds, default=recorded.seeds, metavar="0,1,...", help=f"one run each (default {shown})")
    add("--runs", type=Path, default=ROOT / "runs", help="where run folders lie (default runs/ in the checkout)")
    add("--results", type=Path, default=results_folder(recorded.folder), help="default: results/ beside the script")
    add("overrides", nargs="*", metavar="key=value", help="as for crossbow_py.train")
    return parser


def table_of(recorded: RecordedRuns) -> Callable[[Result], str]:
    return lambda result: summary_table(result, recorded.target_accuracy)


def summary_table(result: Result, target_accuracy: float) -> str:
    """A row per seed, and their mean when there are several; with what the data cost where workers loaded them."""
    runs = result["runs"]
    header = ["seed", "K", "b", "precision", "executor", "epochs", "test accuracy", "best",
              f"epochs to {target_accuracy}", f"minutes to {target_accuracy}", "minutes of training",
              "images/s"]  # fmt: skip
    rows = [_summary_row(run, target_accuracy) for run in runs]
    if any(run["summary"].get("num_workers") is not None for run in runs):
        header = [*header, "workers", "waiting for data"]
        rows = [[*row, *_data_cells(run)] for row, run in zip(rows, runs, strict=True)]
    if len(rows) > 1:
        final, best = (mean(run["summary"][key] for run in runs) for key in ("test_accuracy", "best_test_accuracy"))
        rows.append(["mean", *[""] * 5, f"{final:.4f}", f"{best:.4f}", *[""] * (len(header) - 8)])
    return markdown_table(header, rows)


def _summary_row(run: Mapping[str, Any], target_accuracy: float) -> list[str]:
    summary, reached = run["summary"], first_at(run, target_accuracy)
    return [
        str(summary["seed"]),
        str(summary["num_learners"]),
        str(summary["batch_size"]),
        summary["precision"],
        summary["executor"],
        f"{summary['epochs']:.4g}",
        f"{summary['test_accuracy']:.4f}",
        f"{summary['best_test_accuracy']:.4f}",
        NONE if reached is None else str(reached["epoch"]),
        NONE if reached is None else f"{reached['elapsed_s'] / 60:.1f}",
        f"{summary['train_time_s'] / 60:.1f}",
        f"{summary['images_per_s']:,.0f}",
    ]


def _data_cells(run: Mapping[str, Any]) -> list[str]:
    """Cells on data; nothing is known of data that lived on the device, and in records older than these numbers."""
    num_workers, wait_share = (run["summary"].get(key) for key in ("num_workers", "data_wait_share"))
    return [NONE if num_workers is None else str(num_workers), NONE if wait_share is None else f"{wait_share:.1%}"]
