"""Trains ResNet-32 on CIFAR-10 by the command line's experiment, one run a seed, and writes results/NAME.json.

    python experiments/resnet32_cifar10/run.py [--experiment NAME] [--name NAME] [--seeds 0,1,...] [key=value ...]

Keys are those of `python -m crossbow_py.train`. A run that was stopped (Ctrl-C, SIGTERM, kill -9) goes on where its
newest checkpoint stands when the same command is given again; the results file is written when all runs are over.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.config import read_yaml
from crossbow_py.telemetry.records import CONFIG_FILE, METRICS_FILE, read_metrics, read_summary
from crossbow_py.train import main as train
from experiments.common.machine import ROOT, machine
from experiments.common.results import results_folder, write_result

EXPERIMENT = "resnet32_cifar10"
# Paths belong to the machine, and these two rates count only the process that happened to end the run.
_LEFT_OUT = ("output_dir", "model_path", "resumed_from", "images_per_s", "wall_time_s")


def main(argv: Sequence[str] | None = None) -> int:
    """Train (or go on training) every seed, then write the result; returns the exit code of the first that failed."""
    options = _parser().parse_args(argv)
    facts, runs, name = machine(), [], options.name or options.experiment
    for seed in options.seeds:
        folder = options.runs / EXPERIMENT / name / f"seed-{seed}"
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

    `images_per_s` is that of the whole run: samples seen by the time spent training, also when it was resumed.
    """
    summary = read_summary(folder)
    kept = {key: value for key, value in summary.items() if key not in _LEFT_OUT}
    kept["images_per_s"] = summary["samples_seen"] / summary["train_time_s"]
    return {
        "summary": kept,
        "config": without_paths(read_yaml(folder / CONFIG_FILE)),
        "epochs": read_metrics(folder / METRICS_FILE),
    }


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what belongs to one machine."""
    kept = {key: value for key, value in config.items() if key not in ("output_dir", "resume")}
    data = {key: value for key, value in config["data"].items() if key != "root"}
    return {**kept, "data": data}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--experiment", default="resnet32_short", help="of the command line (default %(default)s)")
    add("--name", help="name of the results file (default: the experiment's)")
    add("--seeds", type=_seeds, default=(0,), metavar="0,1,...", help="one run each (default 0)")
    add("--runs", type=Path, default=ROOT / "runs", help="where run folders lie (default runs/ in the checkout)")
    add("--results", type=Path, default=results_folder(EXPERIMENT), help="default: results/ beside this script")
    add("overrides", nargs="*", metavar="key=value", help="as for crossbow_py.train")
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    """Whole numbers between commas; argparse turns a ValueError into its own message."""
    return tuple(int(seed) for seed in text.split(","))


if __name__ == "__main__":
    raise SystemExit(main())
