"""Trains ResNet-18 on 200 photographs of flowers, one run a seed, and writes results/flowers.json.

    python experiments/flowers/run.py [--seeds 0,1,...] [key=value ...]

Keys are those of `python -m crossbow_py.train`. A run that was stopped (Ctrl-C, SIGTERM, kill -9) goes on where its
newest checkpoint stands when the same command is given again; the results file is written when all runs are over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.cli.config_files import read_yaml
from crossbow_py.telemetry.records import CONFIG_FILE, METRICS_FILE, read_metrics, read_summary
from crossbow_py.train.__main__ import main as train
from experiments.bench.machine import ROOT, machine
from experiments.bench.program import seeds
from experiments.bench.results import results_folder, write_result
from experiments.grids.report import first_at
from experiments.tables.markdown import NONE, markdown_table

Result = Mapping[str, Any]
TARGET = 0.45
# Paths belong to the machine, and the wall time is that of the process that happened to end the run.
_LEFT_OUT = ("output_dir", "model_path", "resumed_from", "wall_time_s")


def main(argv: Sequence[str] | None = None) -> int:
    """Train (or go on training) every seed, then write the result; returns the exit code of the first that failed."""
    parser = argparse.ArgumentParser(description="Trains on photographs, one run a seed, and writes a results file.")
    add = parser.add_argument
    add("--seeds", type=seeds, default=(0, 1, 2), metavar="0,1,...", help="one run each (default 0,1,2)")
    add("--runs", type=Path, default=ROOT / "runs", help="where run folders lie (default runs/ in the checkout)")
    add("--results", type=Path, default=results_folder("flowers"), help="default: results/ beside the script")
    add("overrides", nargs="*", metavar="key=value", help="as for crossbow_py.train")
    options = parser.parse_args(argv)
    facts, runs = machine(), []
    for seed in options.seeds:
        folder = options.runs / "flowers" / "flowers" / f"seed-{seed}"
        code = train([
            "+experiment=flowers", f"seed={seed}", f"output_dir='{folder}'", "resume=auto", *options.overrides,
        ])  # fmt: skip
        if code:
            print(f"seed {seed} is not done; give the same command again to go on from its newest checkpoint.")
            return code
        runs.append(collect(folder))
    path = options.results / "flowers.json"
    write_result(path, {"machine": facts, "n": len(runs), "runs": runs})
    print(f"written to {path}")
    return 0


def collect(folder: Path) -> dict[str, Any]:
    """A finished run as plain values: configuration, summary, and a record per epoch.

    `images_per_s`, `data_wait_share` and `num_workers` are those of the whole run, also when it was resumed.
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
        if share is None:  # data that lived on the device
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


def summary_table(result: Result) -> str:
    """A row per seed, and their mean when there are several."""
    runs = result["runs"]
    header = ["seed", "K", "b", "precision", "executor", "epochs", "test accuracy", "best", f"epochs to {TARGET}",
              f"minutes to {TARGET}", "minutes of training", "images/s", "workers", "waiting for data"]  # fmt: skip
    rows = [_summary_row(run) for run in runs]
    if len(rows) > 1:
        final, best = (mean(run["summary"][key] for run in runs) for key in ("test_accuracy", "best_test_accuracy"))
        rows.append(["mean", *[""] * 5, f"{final:.4f}", f"{best:.4f}", *[""] * 6])
    return markdown_table(header, rows)


def _summary_row(run: Mapping[str, Any]) -> list[str]:
    summary, reached = run["summary"], first_at(run, TARGET)
    num_workers, waited = (summary.get(key) for key in ("num_workers", "data_wait_share"))
    return [
        *(str(summary[key]) for key in ("seed", "num_learners", "batch_size", "precision", "executor")),
        f"{summary['epochs']:.4g}",
        *(f"{summary[key]:.4f}" for key in ("test_accuracy", "best_test_accuracy")),
        NONE if reached is None else str(reached["epoch"]),
        NONE if reached is None else f"{reached['elapsed_s'] / 60:.1f}",
        f"{summary['train_time_s'] / 60:.1f}",
        f"{summary['images_per_s']:,.0f}",
        NONE if num_workers is None else str(num_workers),
        NONE if waited is None else f"{waited:.1%}",
    ]


TABLES = {"summary": summary_table}


if __name__ == "__main__":
    raise SystemExit(main())
