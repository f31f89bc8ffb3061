"""The sides of the comparison. Each trains for ever and passes the gate at every tick.

`default_loop` is what a tutorial teaches: float32, NCHW, every core on one model, a `DataLoader` over tensors. It is
spared the augmentation that the other sides pay for. `tuned_single` is in tuned.py. `serial` and `threads` are this
project's executors, driven through `Trainer.fit` with its feed and all telemetry (console, records, TensorBoard) on.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from crossbow_py.averaging import SMA, AveragingRule, Independent
from crossbow_py.checkpoint import CheckpointSettings
from crossbow_py.engine.optimizers import SGD
from crossbow_py.engine.precision import PrecisionName
from crossbow_py.telemetry.console import ConsoleListener
from crossbow_py.telemetry.events import Listener, Progress
from crossbow_py.trainer import Trainer
from experiments.common.machine import usable_cores
from experiments.throughput.gate import Gate
from experiments.throughput.tuned import tuned_single
from experiments.throughput.workloads import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Workload

SINGLE_SIDES = ("default_loop", "tuned_single")
EXECUTOR_SIDES = ("serial", "threads")
_RULES: dict[str, AveragingRule] = {"sma": SMA(), "none": Independent()}
AVERAGING_WORDS = {"sma": "with SMA", "none": "without averaging"}
_ENDLESS_EPOCHS = 1e6


@dataclass(frozen=True)
class Side:
    """One row of the comparison. `averaging` is sma, or none: independent learners, or a side of one plain model."""

    side: str
    num_learners: int
    averaging: str
    precision: PrecisionName

    @property
    def executor(self) -> Literal["serial", "threads"]:
        """The executor of a side of ours, which is called by its name."""
        return "serial" if self.side == "serial" else "threads"

    @property
    def label(self) -> str:
        """As it is called on the terminal."""
        if self.side in SINGLE_SIDES:
            return f"{self.side} {self.precision}"
        return f"{self.side} K={self.num_learners} {AVERAGING_WORDS[self.averaging]} {self.precision}"


def run_side(side: Side, workload: Workload, gate: Gate) -> None:
    """Train until the gate raises FinishedError."""
    if side.side == "default_loop":
        default_loop(workload, gate)
    elif side.side == "tuned_single":
        tuned_single(side.precision, workload, gate)
    else:
        trainer_fit(side, workload, gate)


def default_loop(workload: Workload, gate: Gate) -> None:
    """PyTorch's training loop as the tutorials have it."""
    device = torch.device(workload.device)
    torch.set_num_threads(usable_cores())
    loader = DataLoader(TensorDataset(*workload.tensors()), workload.batch_size, shuffle=True, drop_last=True)
    model = workload.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (workload.mean, workload.std))
    gate.ready(torch.get_num_threads())
    running_loss = 0.0
    while True:
        for images, labels in loader:
            inputs = (images.to(device).float() / 255 - mean) / std
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            running_loss += loss.item()
            gate.tick(workload.batch_size)


def trainer_fit(side: Side, workload: Workload, gate: Gate) -> None:
    """One long `Trainer.fit`. It has no test data and writes no checkpoints, as throughput leaves out both."""
    torch.set_num_threads(1)  # a learner; what `threads` does by itself holds for `serial` here too
    rule = _RULES[side.averaging]
    moved = workload.batch_size * (side.num_learners if rule.has_central_model else 1)
    ticks = _Ticks(gate, samples_per_round=moved, images_per_round=workload.batch_size * side.num_learners)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        trainer = Trainer(
            model=workload.make_model,
            train_data=workload.tensors(),
            num_classes=workload.num_classes,
            optimizer=SGD(learning_rate=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY),
            averaging=rule,
            augmentation=workload.augmentation,
            mean=workload.mean,
            std=workload.std,
            output_dir=folder,
            checkpoint=CheckpointSettings(every_epochs=None),
            callbacks=[ConsoleListener(Path(folder) / "console.log", stream=nowhere), ticks],
            batch_size=workload.batch_size,
            num_learners=side.num_learners,
            executor=side.executor,
            device="cuda" if workload.device == "cuda" else "cpu",
            precision=side.precision,
        )
        gate.ready(torch.get_num_threads())
        trainer.fit(max_epochs=_ENDLESS_EPOCHS)


class _Ticks(Listener):
    """Passes the gate from the training loop's own thread, a few times a second.

    A call comes when a round has been submitted and the one before is over. As this holds at both ends of a window, as
    many rounds are finished within it as are submitted.
    """

    def __init__(self, gate: Gate, *, samples_per_round: int, images_per_round: int) -> None:
        self._gate, self._samples_per_round, self._images_per_round = gate, samples_per_round, images_per_round
        self._samples_seen = 0

    def on_progress(self, progress: Progress) -> None:
        """Independent learners move the sample stream by one batch a round, but each of them takes one."""
        rounds = (progress.samples_seen - self._samples_seen) // self._samples_per_round
        self._samples_seen = progress.samples_seen
        self._gate.tick(rounds * self._images_per_round)
