"""A run: its settings, its components and its state, in one object that owns them.

Saving a run in a checkpoint and restoring it is in `checkpoints/resume.py`.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn

from crossbow_py.averaging import AveragingRule, OuterStep, Stage
from crossbow_py.core.errors import CentralModelError, CrossbowError, UnknownIdError, UserError, is_of_data
from crossbow_py.data.augmentation import Augmentation
from crossbow_py.data.datasets import Data, sample_digest
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.distributed.ranks import Place, Ranks
from crossbow_py.distributed.settings import DistributedSettings
from crossbow_py.distributed.synchronisation import differing_ranks
from crossbow_py.engine.bank.average_ema import AverageEMA
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import EXECUTORS, Executor
from crossbow_py.engine.goodput import ROUNDS_UNKNOWN, compares_in
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks, taken
from crossbow_py.engine.update.optimizers import Optimizer, for_learner
from crossbow_py.engine.update.outer_step import bring_up_to_date, mean_of_learners, take_outer_step
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.telemetry.timeline import Timeline
from crossbow_py.train.checkpoints import checkpoint
from crossbow_py.train.checkpoints.checkpoint import CheckpointSettings
from crossbow_py.train.checkpoints.weights import MODEL_FILE, save_weights
from crossbow_py.train.evaluation.evaluator import Evaluation, Evaluator, State, mean_evaluation
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.run_state import BestModels, RunState, is_better
from crossbow_py.train.schedules import Schedule
from crossbow_py.train.tuning.busy_cores import BusyCores
from crossbow_py.train.tuning.learner_tuning import LearnerTuning
from crossbow_py.train.tuning.worker_autotuner import WorkerAutotuner

_SHORT = 4  # times as long as the gain is unknown: in shorter runs that is much of them

# An evaluation of a data set: the one that stops look at, and each learner's when learners are independent.
Measured = tuple[Evaluation, tuple[Evaluation, ...]]


class SavedModels(NamedTuple):
    """The path of a run's saved models, None if there is none, and the SHA-256 of each file by its name.

    `samples_seen` is how many samples the models had seen, also of a run without a folder.
    """

    path: str | None
    digests: dict[str, str]
    samples_seen: int | None = None


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
        """What tells the training data from others, in every checkpoint; None if they are items."""
        return sample_digest(self.train)

    @property
    def names_of_classes(self) -> tuple[str, ...]:
        """The names of the classes; empty if they are not known."""
        return tuple(map(str, self.class_names or getattr(self.test, "classes", None) or ()))


@dataclass
class Run:
    """Everything that the training loop works on; built by the trainer and kept over several calls of `fit`.

    Attributes:
        experiment: the name of the run in records.
        names: the names of the model and the data in records.
        resumed_from: the checkpoint that the run resumed from.
        choices: the values chosen for `auto`.
        average_ema: the EMA of z, if the rule asks for one.
        update: updates rows of the bank by corrections and averagings, with the optimizer and the rule.
        validation_feed: batches to evaluate on; if there are any, stops look at them.
        places: those of all ranks.
        nodes: `Ranks.nodes`, if every node has an average model of its own; else None.
        timeline: records a span of every task, if there is one.
        warnings: messages for the user when training starts.
        tokens_per_sample: as of `RunInfo`.
        tuning: tunes the number of learners, for num_learners=auto.
        worker_autotuner: tunes the number of workers, for num_workers=auto with streamed data.
        busy_cores: chooses how threads wait for each other, on CPUs.
        best: the models of the best evaluation, if the run is to return them.
        returned_best: whether `fit` returned them, and no round has been trained since.
        told: the messages that need not be told again, by later calls of `fit`.
        in_fit: whether `fit` is at work.
        in_flight: whether a round is in flight, so that nobody may read the bank.
    """

    data: DataSets
    settings: RunSettings
    schedule: Schedule
    checkpoints: CheckpointSettings
    distributed: DistributedSettings
    output_dir: Path | None
    experiment: str
    names: dict[str, str]
    resumed_from: str | None

    choices: Choices
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

    state: RunState = field(default_factory=RunState)
    tokens_per_sample: int | None = None
    tuning: LearnerTuning | None = None
    worker_autotuner: WorkerAutotuner | None = None
    busy_cores: BusyCores | None = None
    best: BestModels | None = None
    returned_best: bool = False
    told: set[str] = field(default_factory=set)
    in_fit: bool = False
    in_flight: bool = False
    _notes: list[str] = field(default_factory=list)

    @property
    def rule(self) -> AveragingRule:
        """The averaging rule."""
        return self.update.rule

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.update.optimizer

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
    def beside(self) -> list[int]:
        """The ranks on this rank's node, itself included, in order."""
        own = self.places[self.ranks.rank]
        return [rank for rank, place in enumerate(self.places) if place.is_beside(own)]

    @property
    def node_name(self) -> str:
        """The name of this rank's node in records: its number in the order of ranks, and its host."""
        nodes = list(dict.fromkeys((place.node, place.host) for place in self.places))
        own = self.places[self.ranks.rank]
        host = re.sub(r"[^\w.-]", "_", own.host)
        return f"node_{nodes.index((own.node, own.host))}_{host}"

    @property
    def progress(self) -> float:
        """The samples that the schedule and the planned end count: those seen, or effective ones."""
        return self.state.effective_samples if self.settings.count_effective_samples else self.state.samples_seen

    @property
    def groups(self) -> dict[str, Any]:
        """The settings objects that decide how learners learn, by the group that they are chosen from."""
        return {"optimizer": self.optimizer, "schedule": self.schedule, "averaging": self.rule}

    def new_executor(self) -> Executor:
        """Return a new executor over the bank. It may start threads: close it."""
        executor = EXECUTORS[self.choices.executor](self._tasks())
        if self.timeline is not None:
            executor.trace(self.timeline)
        self.ranks.watch.running = executor.running
        return executor

    def _tasks(self) -> RoundTasks:
        return RoundTasks(
            self.bank,
            update=self.update,
            feed=self.train_feed,
            loss=self.loss,
            seed=self.settings.seed,
            collective=self.collective,
            compile_model=self.settings.compile_model,
            accumulate=self.settings.accumulate,
            compares=self.state.noise is not None,
            label_smoothing=smoothing_rows(self.settings.label_smoothing, self.bank),
        )

    def plan(
        self,
        index: int,
        cursor: int,
        factor: float,
        rounds_apart: int = 1,
        first_factor: float = 1.0,
        is_last: bool = False,
    ) -> Round:
        """Plan round `index` from stream position `cursor`: the batch and learning rate of each learner.

        For `factor`, `rounds_apart` and `is_last` see `Stage`; `first_factor` is that of the first round apart.
        """
        learners, batch_size = range(self.bank.num_learners), self.train_feed.batch_size
        own = cursor + self.bank.first_learner * batch_size
        devices = self.collective.num_devices
        noise, total = self.state.noise, self.bank.total_learners
        scale = self.rule.rate_scale(total, 1.0 if noise is None else noise.gain(total))
        rates = tuple(for_learner(self.optimizer.learning_rate, j) * (factor * scale) for j in learners)
        first = for_learner(self.optimizer.learning_rate, 0) * (first_factor * scale)
        stage = Stage(index, len(learners) * devices, rates[0], factor, rounds_apart, devices, first, is_last)
        return Round(
            index=index,
            starts=tuple(own + j * batch_size if self.rule.has_central_model else cursor for j in learners),
            learning_rates=rates,
            together=self.rule.round(stage),
            joins_nodes=self.collective.apart and self.rule.joins_nodes(index),
            compares=len(learners) > 1 and self._compares_in(index),
        )

    def _compares_in(self, index: int) -> bool:
        noise = self.state.noise
        return noise is not None and compares_in(index, self.bank.num_learners, noise.count)

    def compare_alone(self, plan: Round) -> None:
        """Compare the gradients of a single learner, if it is due, by the batch of a round that has not begun.

        Nothing may be in flight. Host–device synchronisation on CUDA.
        """
        found = self._tasks().compare_halves(0, self.train_feed.batch(plan.starts[0]))
        if found is not None:
            self.state.compared.append((plan.index, found))

    def compares_alone(self, plan: Round) -> bool:
        """Return whether `compare_alone` is due before a round."""
        return len(plan.starts) == 1 and self._compares_in(plan.index)

    def sit_out(self, plan: Round) -> None:
        """Take part in a round without this device's learners: they add nothing to the sum, and z moves as elsewhere.

        The executor is closed or drained.
        """
        if plan.averaging is not None:
            if plan.averages:
                self.bank.total.zero_row(0)
                self._tasks().move(RoundOutcome(plan))
        elif plan.outer_step is not None:
            self.take_outer_step(plan.outer_step, without=range(self.bank.num_learners))
        elif self.bank.replicas_identical:  # its learners do not step until they get another rank's weights
            self.bank.total.zero_row(0)
            self.collective.all_reduce_sum(self.bank.total.storage)

    def take_replica(self, is_intact: bool) -> None:
        """Copy a replica from a rank where it is intact, if all replicas are equal. All ranks together, drained."""
        bank = self.bank
        if bank.replicas_identical:
            found = self.ranks.gather([is_intact, bank.step_counts[0]])
            source = next((rank for rank, (intact, _) in enumerate(found) if intact), 0)
            self.ranks.copy_from(source, bank.replica_tensors(0, all(steps for _, steps in found)))
            bank.step_counts[0] = int(found[source][1])
            bank.refresh_shadow(0)
        bank.align_groups()
        self.adopt_learner()

    def adopt_learner(self) -> None:
        """Set z to one of the learners, if they are equal. Nothing is in flight."""
        if self.bank.replicas_identical:
            self.bank.adopt_learner()

    def take_outer_step(self, step: OuterStep, without: Collection[int] = ()) -> None:
        """Move z by an outer step (`engine/update/outer_step.py`). All ranks together, drained."""
        take_outer_step(self.bank, step, self.collective, self.ranks.adder, without=without)

    def restart(self) -> None:
        """Restart the learners from z; see `SMA.restart_momentum`. All ranks together, drained.

        Non-finite learners of this device do not count.
        """
        self.bring_up_to_date()
        self.bank.restart(self.rule.restart_momentum, self.ranks.adder, self.state.non_finite_learners)

    def bring_up_to_date(self) -> None:
        """Set z to the learners' mean, if z is as old as their last averaging. All ranks together, drained."""
        if self.rule.shows_mean and not self.bank.is_single:
            bring_up_to_date(self.bank, self.collective, self.state.non_finite_learners)

    @property
    def feeds(self) -> list[Feed]:
        """The training feed, and the validation and test feed if there are such data."""
        return [feed for feed in (self.train_feed, self.validation_feed, self.test_feed) if feed is not None]

    def feed_notes(self) -> list[str]:
        """Return the messages about the data since the last call."""
        return taken(self._notes) + list(dict.fromkeys(note for feed in self.feeds for note in feed.take_notes()))

    def close_feeds(self) -> None:
        """End the threads and processes of all feeds."""
        for feed in self.feeds:
            feed.close()

    def final_states(self, ema: bool = True) -> list[State]:
        """Return the state dict of the average model, or of every independent learner.

        Non-finite learners count neither in BatchNorm's statistics nor in means of weights. With `ema` it is the EMA of
        the average model, if there is one. All ranks call it together, and get the same.
        """
        if not self.rule.has_central_model:
            return [self.bank.learner_state(learner) for learner in range(self.bank.num_learners)]
        state = self._central_state()
        if self.average_ema is not None and ema:
            state = self.average_ema.at(state, self.state.samples_seen)
        return [self._recalibrated(state) if self.rule.batch_norm == "recalibrate" else state]

    def _recalibrated(self, state: State) -> State:
        """Recalibrate BatchNorm on the training batches that come next, if they can be loaded."""
        share = range(self.ranks.rank, self.rule.recalibration_batches, self.ranks.num_ranks)
        starts = [self.state.samples_seen + number * self.train_feed.batch_size for number in share]
        try:
            with contextlib.closing(self.train_feed.aside(starts)) as batches:
                parts = (part.inputs for batch in batches for part in batch.parts(self.settings.accumulate))
                return self.evaluator.recalibrate(state, parts, self.ranks)
        except CrossbowError as error:
            if not is_of_data(error):
                raise
            self._notes.append(f"BatchNorm's statistics are means of the learners', not measured anew: {error}")
            return state

    def _central_state(self) -> State:
        """Return the state dict of z: the mean over nodes if each has its own, or the learners' mean by some rules."""
        excluded = list(self.state.non_finite_learners)
        state = self.bank.central_state(excluded, self.ranks.adder)
        if self.rule.shows_mean and not self.bank.is_single:
            return {**state, **mean_of_learners(self.bank, self.collective, excluded).shaped()}
        if not self.collective.apart:
            return state
        z = self.bank.new_flat()
        z.copy_row(0, self.bank.z)
        self.collective.mean_over_nodes(z.storage)
        return {**state, **z.shaped()}

    def move_ema(self) -> None:
        """Update the EMA of z. All ranks together, drained."""
        assert self.average_ema is not None, "nothing asks for an EMA"
        self.average_ema.move(self._central_state(), self.state.samples_seen)

    def keep_if_best(self, accuracy: float | None, loss: float, states: Sequence[State]) -> None:
        """Keep the models that were just evaluated, if they are the best that this run has kept."""
        best = self.best
        if best is None or is_better(accuracy, loss, best.accuracy, best.loss):
            self.best = BestModels.of(accuracy, loss, self.state.samples_seen, states)

    @property
    def model_samples(self) -> int:
        """The samples that the current models had seen: the run's, or those of the best models just returned."""
        return self.best.samples_seen if self.returned_best and self.best else self.state.samples_seen

    def feed_of(self, which: str) -> Feed | None:
        """Return the feed of the `test` or `validation` data."""
        return self.test_feed if which == "test" else self.validation_feed

    def current_states(self) -> list[State]:
        """Return the states of `final_states`, or of the best models if `fit` has just returned these.

        All ranks together, with nothing in flight, also after an error.
        """
        if self.returned_best and self.best is not None:
            return self.best.states
        if self.choices.device.type == "cuda":
            torch.cuda.synchronize(self.choices.device)  # an error may have left streams at work
        self.adopt_learner()
        return self.final_states()

    def evaluate(self, which: str, states: Sequence[State] | None = None) -> Measured | None:
        """Evaluate models on the `test` or `validation` data, the current ones by default; None without such data.

        All ranks call it together; each evaluates a share of the samples. Returns the evaluation that stops look at,
        and for independent learners the evaluation of each; the first one is then their mean.
        """
        feed = self.feed_of(which)
        if feed is None:
            return None
        try:
            each = tuple(
                self.evaluator.evaluate(state, feed, self.ranks, examples=number == 0)
                for number, state in enumerate(self.current_states() if states is None else states)
            )
        except UnknownIdError as error:
            raise UnknownIdError(f"of the {which} data, {error}") from error
        return (each[0], ()) if self.rule.has_central_model else (mean_evaluation(each), each)

    def models(self) -> list[nn.Module]:
        """Return the average model or its EMA, or every independent learner, in float32 and evaluation mode.

        Right after a `fit` that returned the best models, these.
        """
        return [self.evaluator.module(state) for state in self.current_states()]

    def save_models(self, models: Sequence[nn.Module]) -> SavedModels:
        """Write models as safetensors to the run's folder, if it has one. All ranks call it; the first one writes.

        Raises UserError when they cannot be written.
        """
        if self.output_dir is None:
            return SavedModels(None, {}, self.model_samples)
        digests = dict[str, str]()
        single = self.rule.has_central_model
        names = [MODEL_FILE] if single else [f"model_{j}.safetensors" for j in range(len(models))]
        with self.ranks.together():
            for name, module in zip(names, models, strict=True) if self.ranks.is_first else ():
                try:
                    digests[name] = save_weights(module, self.output_dir / name)
                except OSError as error:
                    raise UserError(
                        f"cannot write {self.output_dir / name} ({error}); make room there and resume the run."
                    ) from error
        path = str(self.output_dir / names[0]) if single else str(self.output_dir)
        return SavedModels(path, digests, self.model_samples)

    def newest_checkpoint(self) -> str | None:
        """Return the folder of the newest checkpoint, or None."""
        found = checkpoint.checkpoints(self.output_dir) if self.output_dir else []
        return str(found[0]) if found else None

    def epoch_sums(self) -> tuple[float, int, float | None]:
        """Return the epoch's sums over all ranks: losses, their number, correct predictions. All ranks together."""
        state = self.state
        loss_sum, num_losses, num_correct = self.ranks.sum(
            [state.loss_sum, state.num_losses, math.nan if state.num_correct is None else state.num_correct]
        )
        return loss_sum, int(num_losses), None if math.isnan(num_correct) else num_correct

    def spread(self) -> float | None:
        """Return the root mean square of |w_j − c| / |c| over the learners of all ranks. All ranks together.

        c is z, or the learners' mean if the rule evaluates that. None with one learner, or if c is zero or no learner
        is finite.
        """
        excluded = list(self.state.non_finite_learners)
        if self.bank.is_single:
            return None
        center = mean_of_learners(self.bank, self.collective, excluded) if self.rule.shows_mean else None
        squares = self.bank.squared_distances(center, excluded)
        total, count = self.ranks.sum([sum(squares), len(squares)])
        return math.sqrt(total / count) if count else None

    def check_z(self) -> None:
        """Compare z over ranks, on which it must be equal. All ranks together, drained.

        Raises CentralModelError on the first rank, RankError on the others.
        """
        ranks = self.ranks
        if ranks.num_ranks == 1:
            return
        found = ranks.gather([ranks.node if self.collective.apart else 0, self.bank.z_checksum()])
        if odd := differing_ranks(found):
            ranks.raise_any(CentralModelError(odd, self.state.round_index) if ranks.is_first else None)

    def remarks(self, total_samples: int | None) -> list[str]:
        """Return warnings about settings that do not fit a run of that many samples; None if that is not known.

        Raises UserError if the rule needs to know it.
        """
        if self.rule.needs_end and total_samples is None:
            raise UserError(
                "averaging.quadratic_period needs to know the end of the run, where learners average at the latest; "
                "set max_epochs or max_samples."
            )
        remark = None if total_samples is None else self.schedule.remark(total_samples / self.num_samples)
        rounds = math.inf if total_samples is None else -(-total_samples // self.samples_per_round)
        said = [*([remark] if remark else []), *self._remarks_on_averaging(rounds)]
        by_gain = self.rule.scales_by_gain or self.settings.count_effective_samples
        if by_gain and not self.bank.is_single and rounds < _SHORT * ROUNDS_UNKNOWN:
            said.append(
                f"AdaScale's gain counts as 1 until it is known, after {ROUNDS_UNKNOWN} rounds, and this run has about "
                f"{rounds:.0f}; set averaging.rate_scaling=sqrt for one so short."
            )
        return said

    def _remarks_on_averaging(self, rounds: float) -> list[str]:
        rule, bank = self.rule, self.bank
        if bank.is_single or self.tuning:
            return []
        if bank.replicas_identical:
            size = rule.gradient_mean and rule.gradient_mean.group_size
            one_group = (
                f"averaging.group_size={size} puts all {bank.num_learners} learners into one group: they average "
                "gradients, and no models; take a smaller one for several groups."
            )
            return [] if size is None else [one_group]
        if rule.averaging_period > rounds and not rule.shows_mean:
            return [
                f"averaging.averaging_period={rule.averaging_period} is longer than the run of {rounds} rounds: "
                "learners never average, and the average model stays as it began; take a smaller one."
            ]
        if rule.node_period > 1 and not self.collective.apart:
            return [f"averaging.node_period={rule.node_period} is for several nodes; with one it does nothing."]
        if self.collective.apart and rule.averaging_period * rule.node_period > rounds:
            return [
                f"averaging.node_period={rule.node_period} is longer than the run of {rounds} rounds: nodes never "
                "join, and evaluations show the mean of what each learned by itself; take a smaller one."
            ]
        return []


def smoothing_rows(share: float, bank: ReplicaBank) -> Tensor | None:
    """Return the label smoothing of every row of a bank, [capacity]; None for none."""
    return torch.full((bank.capacity,), share, dtype=bank.precision.master, device=bank.device) if share else None
