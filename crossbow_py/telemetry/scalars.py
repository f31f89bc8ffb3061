"""The curves of a run: the values of its events by their tags, which every logger shares. Pure functions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from crossbow_py.telemetry.events import EpochRecord, Progress, Summary

_FIGURES = (
    "epochs", "samples_seen", "model_epoch", "test_accuracy", "test_loss", "best_test_accuracy",
    "best_validation_accuracy", "time_to_accuracy_s", "train_time_s", "wall_time_s", "images_per_s", "tokens_per_s",
    "data_wait_share", "num_learners", "num_reseeded", "num_non_finite",
)  # fmt: skip


def training_scalars(found: Progress | EpochRecord, num_devices: int) -> dict[str, float | None]:
    """Return the figures of training, within an epoch or at its end."""
    return {
        "loss/train": found.train_loss,
        "learning_rate": found.learning_rate,
        "num_learners": found.num_learners,
        "time/training_s": found.elapsed_s,
        "data/wait_share": found.data_wait_share,
        "data/num_workers": found.num_workers,
        "throughput/images_per_s": found.images_per_s,
        "throughput/tokens_per_s": found.tokens_per_s,
        "throughput/images_per_s_per_device": found.images_per_s / num_devices,
        "goodput/noise_scale_samples": found.noise_scale_samples,
        "goodput/efficiency": found.efficiency,
        "goodput/images_per_s": None if found.efficiency is None else found.efficiency * found.images_per_s,
    }


def evaluation_scalars(record: EpochRecord) -> dict[str, float | None]:
    """Return the other figures of a closed epoch; see `learner_scalars` for those of independent learners."""
    learning = {} if record.learning is None else dataclasses.asdict(record.learning)
    measured = "validation" if record.validation_loss is not None else "test"
    return {
        "loss/test": record.test_loss,
        "loss/validation": record.validation_loss,
        "accuracy/train": record.train_accuracy,
        "accuracy/test": record.test_accuracy,
        "accuracy/validation": record.validation_accuracy,
        f"accuracy/{measured}_z": record.z_accuracy,
        **{f"metrics/{name}": value for name, value in record.metrics.items()},
        "averaging/spread": record.spread,
        "averaging/correction_norm": record.correction_norm,
        **{f"learning/{name}": value for name, value in learning.items()},
    }


def learner_scalars(record: EpochRecord) -> list[dict[str, float | None]]:
    """Return the figures of each independent learner at a closed epoch, by the tags that their mean has."""
    measured = "validation" if record.validation_loss is not None else "test"
    accuracies, losses = record.learner_accuracy or (), record.learner_loss or ()
    return [
        {f"loss/{measured}": loss, f"accuracy/{measured}": accuracy}
        for loss, accuracy in itertools.zip_longest(losses, accuracies)
    ]


def final_figures(summary: Summary) -> dict[str, float | None]:
    """Return the figures of a run that has ended, `summary/` and the name that they have in summary.json."""
    found = {f"summary/{name}": getattr(summary, name) for name in _FIGURES}
    return {**found, **{f"summary/metrics/{name}": value for name, value in summary.metrics.items()}}


def finite_values(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that there are and that can be drawn."""
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}


def next_point_s(now_s: float, interval_s: float) -> float:
    """Return when the next point within an epoch is due, in seconds of training.

    Points come ever more rarely: short runs get a curve, and long runs' files stay small.
    """
    return now_s + max(interval_s, now_s / 500)
