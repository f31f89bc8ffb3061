"""Draws curve.png: test accuracy and training loss of every run in results/, against samples seen and epochs.

python experiments/resnet32_cifar10/plot.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.results import EXPERIMENTS, read_results
from experiments.resnet32_cifar10.report import TARGET_ACCURACY
from experiments.resnet32_cifar10.run import EXPERIMENT

PICTURE = EXPERIMENTS / EXPERIMENT / "curve.png"
_MILLION = 1e6


def main() -> int:
    """Draw all results; returns the exit code."""
    results = read_results(EXPERIMENT)
    if not results:
        print("error: there are no results yet; run experiments/resnet32_cifar10/run.py first.", file=sys.stderr)
        return 2
    draw(results).savefig(PICTURE, dpi=130, metadata={"Software": None})
    print(f"drawn to {PICTURE.relative_to(EXPERIMENTS.parent)}")
    return 0


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A figure of two panels, a line a run."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    for name, result in results.items():
        for run in result["runs"]:
            _draw_run(accuracy, loss, f"{name}, {_label(run)}", run)
    accuracy.axhline(TARGET_ACCURACY, color="grey", linestyle="--", linewidth=1, label=f"target {TARGET_ACCURACY}")
    accuracy.set(title="test accuracy of the average model", ylim=(0.3, 1.0))
    loss.set(title="training loss of the learners", yscale="log")
    for axes in (accuracy, loss):
        _finish(axes, _samples_per_epoch(results))
    return figure


def _draw_run(accuracy: Axes, loss: Axes, label: str, run: Mapping[str, Any]) -> None:
    samples = [record["samples_seen"] / _MILLION for record in run["epochs"]]
    accuracy.plot(samples, [record["test_accuracy"] for record in run["epochs"]], linewidth=1.4, label=label)
    loss.plot(samples, [record["train_loss"] for record in run["epochs"]], linewidth=1.4, label=label)


def _label(run: Mapping[str, Any]) -> str:
    summary = run["summary"]
    return f"K={summary['num_learners']} b={summary['batch_size']} seed {summary['seed']}"


def _samples_per_epoch(results: Mapping[str, Mapping[str, Any]]) -> float:
    """Of the first run; all are on the same data set."""
    summary = next(iter(results.values()))["runs"][0]["summary"]
    return float(summary["samples_seen"] / summary["epochs"])


def _finish(axes: Axes, samples_per_epoch: float) -> None:
    axes.set_xlabel("million samples seen")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    scale = samples_per_epoch / _MILLION
    epochs = axes.secondary_xaxis(
        "top",
        functions=(
            lambda samples: np.asarray(samples, float) / scale,
            lambda epochs: np.asarray(epochs, float) * scale,
        ),
    )
    epochs.set_xlabel("epochs")


if __name__ == "__main__":
    raise SystemExit(main())
