"""The sides of the comparison at work. Each trains for ever and passes the gate at every tick.

`default_loop` and `tuned_single` are in bench/sides/tuned.py. The rest are this project's executors and `auto`, what it
chooses by itself, driven through `Trainer.fit` with its feed and all telemetry (console, records, TensorBoard) on.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from crossbow_py.averaging import SMA, AveragingRule, SynchronousSGD
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.telemetry.console import ConsoleListener
from crossbow_py.telemetry.events import RoundEnd
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.trainer import Trainer
from experiments.bench.gate import Choice, Gate, Paced, Ready, Settling
from experiments.bench.machine import usable_cores
from experiments.bench.sides.side import AUTO, EXECUTOR_SIDES, OPEN, SINGLE_SIDES, Side
from experiments.bench.sides.tuned import default_loop, tuned_single
from experiments.bench.workers import SideProcess
from experiments.bench.workloads import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Effort, Workload

ALL_SIDES = (*SINGLE_SIDES, *EXECUTOR_SIDES, AUTO)
_NEVER = 10**9
# Without averaging learners still share the samples out: independent ones would all see the same batches, which `fused`
# makes use of.
_RULES: dict[str, AveragingRule] = {
    "sma": SMA(), "none": SMA(averaging_period=_NEVER), "synchronous_sgd": SynchronousSGD(),
}  # fmt: skip
_ENDLESS_EPOCHS = 1e6


def sides_on(device: str) -> list[str]:
    elsewhere = {name for name, executor in EXECUTORS.items() if executor.DEVICE not in (None, device)}
    return [name for name in ALL_SIDES if name not in elsewhere]


def start_side(side: Side, workload: Workload, effort: Effort, patience_s: float | None = None) -> SideProcess:
    """Start the process that measures a side. Raises SideError."""
    return SideProcess(run_side, side, workload, effort, patience_s)


def run_side(side: Side, workload: Workload, gate: Gate, effort: Effort) -> None:
    """Train until the gate raises FinishedError. Raises CrossbowError when a side cannot be had."""
    if side.side == "default_loop":
        default_loop(workload, gate)
    elif side.side == "tuned_single":
        tuned_single(side.precision, workload, gate, effort)
    else:
        trainer_fit(side, workload, gate, effort)


def trainer_fit(side: Side, workload: Workload, gate: Gate, effort: Effort) -> None:
    """One long `Trainer.fit`. It has no test data and writes no checkpoints, as throughput leaves out both."""
    torch.set_num_threads(1 if side.side == "threads" else usable_cores())
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere:
        folder = Path(name)
        trainer = Trainer(
            model=workload.make_model,
            train_data=workload.tensors(),
            num_classes=workload.num_classes,
            optimizer=SGD(learning_rate=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
            averaging=_RULES[side.averaging],
            augmentation=workload.augmentation,
            mean=workload.mean,
            std=workload.std,
            output_dir=folder / "run",
            checkpoint=CheckpointSettings(every_epochs=None),
            callbacks=[ConsoleListener(folder / "console.log", stream=nowhere)],
            batch_size=workload.batch_size,
            num_learners="auto" if side.num_learners == OPEN else side.num_learners,
            executor=side.executor,
            executor_cache=folder / "executors.json",  # nothing is known of the executors that earlier runs took
            device="cuda" if workload.device == "cuda" else "cpu",
            precision=side.precision,
        )
        if side.side == AUTO:
            after_round: Paced | Settling = _settling(trainer, gate, effort)
        else:
            after_round = Paced(gate)
            gate.ready(Ready(torch.get_num_threads()))
        trainer.fit(max_epochs=_ENDLESS_EPOCHS, after_round=after_round)


def _settling(trainer: Trainer, gate: Gate, effort: Effort) -> Settling:
    """The run's own auto-tuner, and the gate from when it has settled."""
    executor, executor_s = trainer.choices.executor, trainer.choices.executor_choice_s

    def ready(end: RoundEnd) -> None:
        choice = Choice(executor, end.num_learners, end.is_settled, round(executor_s, 2), round(end.elapsed_s, 2))
        gate.ready(Ready(1 if executor == "threads" else torch.get_num_threads(), str(choice), choice))

    return Settling(gate, max(0.0, effort.tuning_s - executor_s), ready)
