"""Pictures of recorded runs: test accuracy and training loss, against samples seen and epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.grids.recorded_runs import RecordedRuns

_MANY = 100_000
_UNITS = {1_000: "thousand", 1_000_000: "million"}

Results = Mapping[str, Mapping[str, Any]]


def draw(recorded: RecordedRuns, results: Results) -> Figure:
    unit, target = _unit(results), recorded.target_accuracy
    figure = Figure(figsize=(10, 4), layout="constrained")
    accuracy, loss = figure.subplots(1, 2)
    for name, result in results.items():
        for run in result["runs"]:
            label = f"{name}, {_label(run)}"
            _draw_line(accuracy, run, "test_accuracy", unit, label)
            _draw_line(loss, run, "train_loss", unit, label)
    accuracy.axhline(target, color="grey", linestyle="--", linewidth=1, label=f"target {target}")
    if recorded.chance is not None:
        accuracy.axhline(recorded.chance, color="grey", linestyle=":", linewidth=1, label=f"chance {recorded.chance}")
    accuracy.set(title="test accuracy of the average model", ylim=recorded.shown_accuracy)
    loss.set(title="training loss of the learners", yscale="log")
    for axes in (accuracy, loss):
        _finish(axes, unit, _samples_per_epoch(results))
    return figure


def _draw_line(axes: Axes, run: Mapping[str, Any], key: str, unit: int, label: str) -> None:
    samples = [record["samples_seen"] / unit for record in run["epochs"]]
    axes.plot(samples, [record[key] for record in run["epochs"]], linewidth=1.4, label=label)


def _label(run: Mapping[str, Any]) -> str:
    summary = run["summary"]
    return f"K={summary['num_learners']} b={summary['batch_size']} seed {summary['seed']}"


def _unit(results: Results) -> int:
    """The unit in which samples are counted: millions, or thousands when there are few."""
    most = max(run["summary"]["samples_seen"] for result in results.values() for run in result["runs"])
    return 1_000_000 if most >= _MANY else 1_000


def _samples_per_epoch(results: Results) -> float:
    summary = next(iter(results.values()))["runs"][0]["summary"]
    return float(summary["samples_seen"] / summary["epochs"])


def _finish(axes: Axes, unit: int, samples_per_epoch: float) -> None:
    axes.set_xlabel(f"{_UNITS[unit]} samples seen")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    scale = samples_per_epoch / unit
    epochs = axes.secondary_xaxis(
        "top",
        functions=(
            lambda samples: np.asarray(samples, float) / scale,
            lambda epochs: np.asarray(epochs, float) * scale,
        ),
    )
    epochs.set_xlabel("epochs")
