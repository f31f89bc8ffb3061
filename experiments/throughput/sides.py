"""The sides of the comparison. Each trains for ever and passes the gate at every tick.

`default_loop` is what a tutorial teaches: float32, NCHW, every core on one model, a `DataLoader` over tensors. It is
spared the augmentation that the other sides pay for. `tuned_single` is in tuned.py, peers.py says which sides are other
people's ways to many models. The rest are this project's executors, and `auto` is whatever it chooses by itself, driven
through `Trainer.fit` with its feed and all telemetry (console, records, TensorBoard) on.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from crossbow_py.averaging import SMA, AveragingRule
from crossbow_py.core.errors import CrossbowError
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.modules.precision import PrecisionName
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.telemetry.console import ConsoleListener
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.trainer import Trainer
from experiments.common.machine import usable_cores
from experiments.throughput.gate import Choice, Gate, Ready
from experiments.throughput.one_model import compiled, mps_member
from experiments.throughput.pacing import PacedLearners, SettlingLearners, choosing_afresh
from experiments.throughput.peers import COMPILED, JAX_VMAP, PEER_SIDES, VMAP
from experiments.throughput.tuned import tuned_single
from experiments.throughput.vmapped import vmapped
from experiments.throughput.workloads import LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, Effort, Workload

SINGLE_SIDES = ("default_loop", "tuned_single")
EXECUTOR_SIDES = tuple(EXECUTORS)
AUTO = "auto"
ALL_SIDES = (*SINGLE_SIDES, *EXECUTOR_SIDES, AUTO)
OPEN = 0
_NEVER = 10**9
# Without averaging learners still share the samples out: independent ones would all see the same batches, which `fused`
# makes use of.
_RULES: dict[str, AveragingRule] = {"sma": SMA(), "none": SMA(averaging_period=_NEVER)}
AVERAGING_WORDS = {"sma": "with SMA", "none": "without averaging"}
_ENDLESS_EPOCHS = 1e6

Executor = Literal["auto", "serial", "threads", "fused", "streams"]


@dataclass(frozen=True)
class Side:
    """One row of the comparison. `averaging` is sma, or none: learners that never meet, or a side of one plain model.

    `num_learners` is OPEN where every window says how many it wants, and for `auto` until it has settled. Of `compiled`
    it says on how many learners' images the one model trains in a step.
    """

    side: str
    num_learners: int
    averaging: str
    precision: PrecisionName

    @property
    def executor(self) -> Executor:
        """What `Trainer` calls the executor of a side of ours: the same."""
        return cast(Executor, self.side)

    @property
    def label(self) -> str:
        """As it is called on the terminal."""
        if self.side in SINGLE_SIDES:
            return f"{self.side} {self.precision}"
        learners = "" if self.num_learners == OPEN else f" K={self.num_learners}"
        if self.side in PEER_SIDES:
            return f"{self.side}{learners} {self.precision}"
        return f"{self.side}{learners} {AVERAGING_WORDS[self.averaging]} {self.precision}"

    def chosen(self, ready: Ready) -> Side:
        """The side with the number of learners it chose, if it chose one."""
        return self if ready.choice is None else replace(self, num_learners=ready.choice.num_learners)


def sides_on(device: str) -> list[str]:
    """Names of the sides that run on a type of device."""
    elsewhere = {name for name, executor in EXECUTORS.items() if executor.DEVICE not in (None, device)}
    return [name for name in ALL_SIDES if name not in elsewhere]


def run_side(side: Side, workload: Workload, gate: Gate, effort: Effort) -> None:
    """Train until the gate raises FinishedError. Raises CrossbowError when a side cannot be had."""
    if side.side == "default_loop":
        default_loop(workload, gate)
    elif side.side == "tuned_single":
        tuned_single(side.precision, workload, gate, effort)
    elif side.side in PEER_SIDES:
        try:
            _run_peer(side, workload, gate, effort)
        except RuntimeError as error:  # of a compiler, a capture, JAX, or memory: what others fail with
            words = str(error).splitlines() or ["no more was said"]
            raise CrossbowError(f"{type(error).__name__}: {words[0]}") from error
    else:
        trainer_fit(side, workload, gate, effort)


def _run_peer(side: Side, workload: Workload, gate: Gate, effort: Effort) -> None:
    if side.side == COMPILED:
        compiled(side.precision, side.num_learners, workload, gate)
    elif side.side == VMAP:
        vmapped(side.precision, side.num_learners, workload, gate)
    elif side.side == JAX_VMAP:
        from experiments.throughput.jax_vmap import jax_vmapped  # noqa: PLC0415 - JAX need not be installed

        jax_vmapped(side.precision, side.num_learners, workload, gate)
    else:
        mps_member(side.precision, workload, gate, effort.mps_pipes)


def default_loop(workload: Workload, gate: Gate) -> None:
    """PyTorch's training loop as the tutorials have it."""
    device = torch.device(workload.device)
    torch.set_num_threads(usable_cores())
    loader = DataLoader(TensorDataset(*workload.tensors()), workload.batch_size, shuffle=True, drop_last=True)
    model = workload.make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    mean, std = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (workload.mean, workload.std))
    gate.ready(Ready(torch.get_num_threads()))
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


def trainer_fit(side: Side, workload: Workload, gate: Gate, effort: Effort) -> None:
    """One long `Trainer.fit`. It has no test data and writes no checkpoints, as throughput leaves out both."""
    torch.set_num_threads(1 if side.side == "threads" else usable_cores())
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere:
        folder = Path(name)
        with choosing_afresh(folder) as choosing:
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
                device="cuda" if workload.device == "cuda" else "cpu",
                precision=side.precision,
            )
        if side.side == AUTO:
            trainer.run.tuning = _settling(trainer, gate, workload.batch_size, effort, choosing.seconds)
        else:
            trainer.run.tuning = PacedLearners(gate, workload.batch_size)
            gate.ready(Ready(torch.get_num_threads()))
        trainer.fit(max_epochs=_ENDLESS_EPOCHS)


def _settling(trainer: Trainer, gate: Gate, batch_size: int, effort: Effort, executor_s: float) -> SettlingLearners:
    """The run's own auto-tuner, and the gate from when it has settled."""
    tuning, executor = trainer.run.tuning, trainer.run.choices.executor
    assert tuning is not None, "the trainer was told num_learners=auto"

    def ready(num_learners: int, settled: bool, learners_s: float) -> None:
        choice = Choice(executor, num_learners, settled, round(executor_s, 2), round(learners_s, 2))
        gate.ready(Ready(1 if executor == "threads" else torch.get_num_threads(), str(choice), choice))

    return SettlingLearners(tuning, gate, batch_size, max(0.0, effort.tuning_s - executor_s), ready)
