"""Trains as `python -m crossbow_py.train` does, and evaluates every part with each kind of BatchNorm statistics.

    python -m experiments.batch_norm.variants PARTS key=value ...

Training is the same whichever is chosen, so that it is done once. What is measured is in measured.jsonl in the run's
folder, a line a part, with the seconds that the statistics and the evaluation took, both outside of training.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from crossbow_py.averaging import CentralRule
from crossbow_py.cli.command_line import run
from crossbow_py.core.signals import StopSignal
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.telemetry.console import CONSOLE_LOG, ConsoleListener
from crossbow_py.train.__main__ import build_trainer, stops
from crossbow_py.train.config import TrainConfig
from crossbow_py.train.evaluation.current_models import final_states
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.folder import open_run
from experiments.grids.parts import in_parts
from experiments.grids.running import MEASURED_FILE

MEAN = "mean"
# No part of what cells are known by: after a change run them anew, with another --runs.
VARIANTS: dict[str, Mapping[str, Any]] = {
    MEAN: {"batch_norm": "mean"},
    **{
        f"recalibrate, {number} batches": {"batch_norm": "recalibrate", "recalibration_batches": number}
        for number in (8, 32, 128)
    },
}


def main(argv: Sequence[str]) -> int:
    """Train and measure part by part; returns the exit code of the first that failed."""
    return in_parts(argv, lambda words: run(words, TrainConfig, _train), MEASURED_FILE)


def _train(config: TrainConfig) -> int:
    with open_run(config) as folder, closing(ConsoleListener(folder.path / CONSOLE_LOG)) as console:
        trainer = build_trainer(config, folder, [console])
        result = trainer.fit(**stops(config), counts_earlier_rounds=True, handle_signals=True)
        code = StopSignal.EXIT_CODES.get(result.status, 0)
        if not code:
            line = measure(trainer.run)
            with (folder.path / MEASURED_FILE).open("a") as file:
                file.write(json.dumps(line) + "\n")
    return code


def measure(trained: Run) -> dict[str, Any]:
    """Measure test loss and accuracy with every kind of statistics, when nothing is in flight."""
    samples = trained.state.samples_seen
    try:
        variants = {name: _with_statistics(trained, settings) for name, settings in VARIANTS.items()}
    finally:
        trained.close_feeds()
    return {"epoch": samples / trained.num_samples, "samples_seen": samples, "variants": variants}


def _with_statistics(trained: Run, settings: Mapping[str, Any]) -> dict[str, float | None]:
    """Evaluate as `Run.evaluate` does, with other settings of the averaging rule, and time its two steps."""
    feed = trained.test_feed
    assert feed is not None, "the data sets of cells have test data"
    assert isinstance(trained.rule, CentralRule), "cells have an average model"
    update = TorchUpdate(trained.optimizer, dataclasses.replace(trained.rule, **settings))
    begun_s = _now_s()
    (state,) = final_states(dataclasses.replace(trained, update=update))
    made_s = _now_s()
    found = trained.evaluator.evaluate(state, feed)
    return {
        "test_accuracy": found.accuracy,
        "test_loss": found.loss,
        "statistics_s": made_s - begun_s,
        "evaluation_s": _now_s() - made_s,
    }


def _now_s() -> float:
    """Return the time once the device has done what it was given: host–device synchronisation."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
