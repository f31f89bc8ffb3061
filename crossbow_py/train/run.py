"""A run: its components, which do not change, and its state, which does.

Saving a run in a checkpoint and restoring it is in `checkpoints/resume.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt

from crossbow_py.averaging import AveragingRule
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data, sample_digest
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.distributed.ranks import Place, Ranks
from crossbow_py.engine.bank.average_ema import AverageEMA
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.update.optimizers import Optimizer
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.telemetry.timeline import Timeline
from crossbow_py.train.arguments import TrainArguments
from crossbow_py.train.evaluation.evaluator import Evaluator
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.schedules import Schedule
from crossbow_py.train.train_state import TrainState
from crossbow_py.train.tuning.busy_cores import BusyCores
from crossbow_py.train.tuning.learner_tuning import LearnerTuning
from crossbow_py.train.tuning.worker_autotuner import WorkerAutotuner


@dataclass(frozen=True)
class DataSets:
    """The data sets of a run, and how their images are prepared."""

    train: Data
    test: Data | None = None
    validation: Data | None = None
    num_classes: int | None = None
    augmentation: Augmentation | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    sample_weights: npt.ArrayLike | None = None  # [N], to draw training samples by
    class_names: Sequence[str] | None = None  # None is the attribute `classes` of the test data, if there is one
    labels_as_input: bool = False  # whether the model gets the targets too, for `model_loss`

    @cached_property
    def train_digest(self) -> str | None:
        """A digest that tells the training data from others, in every checkpoint; None if they are items."""
        return sample_digest(self.train)

    @property
    def names_of_classes(self) -> tuple[str, ...]:
        """The names of the classes; empty if they are not known."""
        return tuple(map(str, self.class_names or getattr(self.test, "classes", None) or ()))


@dataclass(frozen=True, kw_only=True)
class Run:
    """The components of a run, built by the trainer and kept over several calls of `fit`.

    Attributes:
        arguments: the arguments of `Trainer`.
        data: its data sets, as they are fed.
        choices: the values chosen for `auto`.
        output_dir: the run's folder, if it has one.
        names: the names of the model and the data in records.
        resumed_from: the checkpoint that the run resumed from.
        average_ema: the EMA of z, if the rule asks for one.
        update: updates rows of the bank by corrections and averagings, with the optimizer and the rule.
        validation_feed: batches to evaluate on; if there are any, stops look at them.
        places: those of all ranks.
        nodes: `Ranks.nodes`, if every node has an average model of its own; else None.
        timeline: records a span of every task, if there is one.
        warnings: messages for the user when training starts.
        tokens_per_sample: as of `RunInfo`.
        state: the counters and the best models: all of a run that training changes, beside the bank.
        tuning: tunes the number of learners, for num_learners=auto.
        worker_autotuner: tunes the number of workers, for num_workers=auto with streamed data.
        busy_cores: chooses how threads wait for each other, on CPUs.
        notes: messages for the user that came up between rounds.
    """

    arguments: TrainArguments
    data: DataSets
    choices: Choices
    output_dir: Path | None
    names: dict[str, str]
    resumed_from: str | None

    bank: ReplicaBank
    average_ema: AverageEMA | None
    update: TorchUpdate
    loss: Loss
    evaluator: Evaluator
    train_feed: Feed
    validation_feed: Feed | None
    test_feed: Feed | None
    collective: Collective
    ranks: Ranks
    places: list[Place]
    nodes: list[int] | None
    timeline: Timeline | None
    warnings: list[str]

    state: TrainState = field(default_factory=TrainState)
    tokens_per_sample: int | None = None
    tuning: LearnerTuning | None = None
    worker_autotuner: WorkerAutotuner | None = None
    busy_cores: BusyCores | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def settings(self) -> RunSettings:
        """The keys that shape the run."""
        return self.arguments.settings

    @property
    def rule(self) -> AveragingRule:
        """The averaging rule."""
        return self.update.rule

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.update.optimizer

    @property
    def schedule(self) -> Schedule:
        """The learning-rate schedule."""
        return self.arguments.rules[1]

    @property
    def samples_per_round(self) -> int:
        """The samples by which a round moves the cursor; independent learners all take the same batch."""
        return self.settings.samples_per_step * (self.bank.total_learners if self.rule.has_central_model else 1)

    @property
    def num_samples(self) -> int:
        """The samples of an epoch, N."""
        return self.train_feed.num_samples

    @property
    def num_workers(self) -> int | None:
        """The worker processes that load training data; None if the data live on the device."""
        return self.train_feed.num_workers if self.train_feed.STREAMS else None

    @property
    def progress(self) -> float:
        """The samples that the schedule and the planned end count: those seen, or effective ones."""
        return self.state.effective_samples if self.settings.count_effective_samples else self.state.samples_seen

    @property
    def groups(self) -> dict[str, Any]:
        """The settings objects that decide how learners learn, by the group that they are chosen from."""
        return {"optimizer": self.optimizer, "schedule": self.schedule, "averaging": self.rule}

    @property
    def feeds(self) -> list[Feed]:
        """The training feed, and the validation and test feed if there are such data."""
        return [feed for feed in (self.train_feed, self.validation_feed, self.test_feed) if feed is not None]

    def feed_of(self, which: str) -> Feed | None:
        """Return the feed of the `test` or `validation` data."""
        return self.test_feed if which == "test" else self.validation_feed

    def close_feeds(self) -> None:
        """End the threads and processes of all feeds."""
        for feed in self.feeds:
            feed.close()
