"""Trains as `python -m crossbow_py.train` does, stopping several times an epoch for an evaluation of its own.

    python -m experiments.grids.parts PARTS key=value ...

Every part goes on where the checkpoint of the one before stands, so that the samples, and the model that comes out, are
those of a run in one piece (but with an `averaging.quadratic_period` that has learners average at the end, which is
then that of every part); what is measured at its end is in metrics.jsonl, at a fraction of an epoch. A schedule that
spans the run is told the length of the whole. A run that was killed goes on when the same command is given again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import CheckpointError
from crossbow_py.telemetry.records import METRICS_FILE, read_metrics, read_summary
from crossbow_py.train.__main__ import main as train
from crossbow_py.train.checkpoints.checkpoint import find_newest
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.schedules import Cosine

_ALIKE = 1e-3  # of an epoch: a part ends with the round in which it does


def main(argv: Sequence[str]) -> int:
    """Train part by part; returns the exit code of the first that failed."""
    return in_parts(argv, train)


def in_parts(argv: Sequence[str], part: Callable[[Sequence[str]], int], file: str = METRICS_FILE) -> int:
    """Train part by part, each by `part`: given a command of `train`, it goes on to its end and returns an exit code.

    `file` is that in the run's folder that has a line, like those of metrics.jsonl, for every part that is done.
    """
    parts, overrides = int(argv[0]), list(argv[1:])
    config = compose(overrides, TrainConfig)
    assert config.max_epochs is not None, "cells say it"
    assert config.output_dir is not None, "it is said for cells"
    folder, length = Path(config.output_dir), whole_length(config)
    for stop in stops(config.max_epochs, parts):
        # The last one is done once the run has ended: a process may have been killed behind its evaluation.
        if stop <= epochs_done(folder, file) + _ALIKE and (
            stop < config.max_epochs or read_summary(folder).get("status") in ("finished", "target_reached")
        ):
            continue
        code = part([*overrides, f"max_epochs={stop:.6g}", *length])
        if code or read_summary(folder).get("status") == "target_reached":
            return code
    return 0


def stops(max_epochs: float, parts: int) -> list[float]:
    """Epochs after which each part ends, `max_epochs` the last."""
    within = [place / parts for place in range(1, math.ceil(max_epochs * parts))]
    return [*within, max_epochs]


def whole_length(config: TrainConfig) -> list[str]:
    """The override that keeps a schedule over the run from ending with a part."""
    spans = isinstance(config.schedule, Cosine) and config.schedule.epochs is None
    return [f"schedule.epochs={config.max_epochs:.6g}"] if spans else []


def epochs_done(folder: Path, file: str = METRICS_FILE) -> float:
    """The epochs at the last line of `file`, one an evaluation, that the newest checkpoint has; 0 without one.

    A run killed between an evaluation and its checkpoint goes on from the one before, and drops the line.
    """
    path = folder / file
    records = read_metrics(path) if path.exists() else []
    try:
        kept = find_newest(folder)[0].samples_seen if records else 0
    except CheckpointError:
        kept = 0
    return max((float(record["epoch"]) for record in records if record["samples_seen"] <= kept), default=0.0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
