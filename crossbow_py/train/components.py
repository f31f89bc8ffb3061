"""The parts of a run: bank, rule, feeds, evaluator and ranks; what a round takes of them, and what comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from crossbow_py.averaging import AveragingRule, OuterStep, Stage
from crossbow_py.core.errors import CrossbowError, is_of_data
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.distributed.ranks import Ranks
from crossbow_py.engine.bank.average_ema import AverageEMA
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors import EXECUTORS, Executor
from crossbow_py.engine.modules.losses import Loss
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.update.optimizers import Optimizer, for_learner
from crossbow_py.engine.update.outer_step import bring_up_to_date, mean_of_learners, take_outer_step
from crossbow_py.engine.update.row_update import TorchUpdate
from crossbow_py.telemetry.timeline import Timeline
from crossbow_py.train.evaluation.evaluator import Evaluation, Evaluator, State, mean_evaluation
from crossbow_py.train.run_settings import Choices


@dataclass(frozen=True)
class Parts:
    """What a run is made of, built once by the trainer.

    `warnings` are sentences for the user; the `timeline`, when there is one, gets a span of every task. `most_learners`
    is how many memory holds, no more than the settings allow; `ranks` are those of the run, and `nodes` their
    `Ranks.nodes`, when nodes have an average model each. `average_ema` is there when the rule asks for it.
    """

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
    warnings: list[str]
    timeline: Timeline | None
    compile_model: bool
    most_learners: int
    ranks: Ranks
    nodes: list[int] | None
    label_smoothing: float
    notes: list[str] = field(default_factory=list)

    @property
    def rule(self) -> AveragingRule:
        """The averaging rule."""
        return self.update.rule

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.update.optimizer

    def new_executor(self, seed: int) -> Executor:
        """Task bodies and the executor over the bank. It may start threads: close it."""
        executor = EXECUTORS[self.choices.executor](self._tasks(seed))
        if self.timeline is not None:
            executor.trace(self.timeline)
        self.ranks.watch.running = executor.running
        return executor

    def _tasks(self, seed: int) -> RoundTasks:
        return RoundTasks(
            self.bank,
            update=self.update,
            feed=self.train_feed,
            loss=self.loss,
            seed=seed,
            collective=self.collective,
            compile_model=self.compile_model,
            label_smoothing=smoothing_rows(self.label_smoothing, self.bank),
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
        """Round `index` from stream position `cursor`: which batch and learning rate each learner gets.

        For `factor`, `rounds_apart` and `is_last` see `Stage`; `first_factor` is that of the first round apart.
        """
        learners, batch_size = range(self.bank.num_learners), self.train_feed.batch_size
        own = cursor + self.bank.first_learner * batch_size
        devices = self.collective.num_devices
        scale = self.rule.rate_scale(self.bank.total_learners)
        rates = tuple(for_learner(self.optimizer.learning_rate, j) * (factor * scale) for j in learners)
        first = for_learner(self.optimizer.learning_rate, 0) * (first_factor * scale)
        stage = Stage(index, len(learners) * devices, rates[0], factor, rounds_apart, devices, first, is_last)
        return Round(
            index=index,
            starts=tuple(own + j * batch_size if self.rule.has_central_model else cursor for j in learners),
            learning_rates=rates,
            together=self.rule.round(stage),
            joins_nodes=self.collective.apart and self.rule.joins_nodes(index),
        )

    def sit_out(self, plan: Round) -> None:
        """Take part in a round without learners of this device: nothing is added to the sum, and z moves alike.

        The executor is closed or drained.
        """
        if plan.averaging is not None:
            self.bank.total.zero_row(0)
            self._tasks(seed=0).move(RoundOutcome(plan))
        elif plan.outer_step is not None:
            self.take_outer_step(plan.outer_step, without=range(self.bank.num_learners))
        elif self.bank.replicas_identical:  # its learners do not step until they are given another's weights
            self.bank.total.zero_row(0)
            self.collective.all_reduce_sum(self.bank.total.storage)

    def take_replica(self, is_whole: bool) -> None:
        """Where all replicas are alike: take those of a rank whose are whole. All ranks call it together, drained."""
        bank = self.bank
        if bank.replicas_identical:
            found = self.ranks.gather([is_whole, bank.step_counts[0]])
            source = next((rank for rank, (whole, _) in enumerate(found) if whole), 0)
            row = bank.trained_row(0)
            self.ranks.copy_from(source, [*row.weights, *(part for parts in row.state.values() for part in parts)])
            bank.step_counts[0] = int(found[source][1])
            bank.refresh_shadow(0)
        bank.align_groups()
        self.adopt_learner()

    def adopt_learner(self) -> None:
        """Once nothing is in flight: z ← one of the learners, where they are alike."""
        if self.bank.replicas_identical:
            self.bank.adopt_learner()

    def take_outer_step(self, step: OuterStep, without: Collection[int] = ()) -> None:
        """See `engine/update/outer_step.py`; drained, all ranks together."""
        take_outer_step(self.bank, step, self.collective, self.ranks.adder, without=without)

    def restart(self, sick: Collection[int] = ()) -> None:
        """Restart the learners from z, when nothing is in flight; see `SMA.restart_momentum`. All ranks together.

        This device's learners that are `sick` count for nothing.
        """
        self.bring_up_to_date(sick)
        self.bank.restart(self.rule.restart_momentum, self.ranks.adder, sick)

    def bring_up_to_date(self, sick: Collection[int] = ()) -> None:
        """Where z is as old as the learners' last averaging: z ← their mean. Drained, all ranks together."""
        if self.rule.shows_mean and not self.bank.is_single:
            bring_up_to_date(self.bank, self.collective, sick)

    @property
    def feeds(self) -> list[Feed]:
        """Of training, validation and test data."""
        return [feed for feed in (self.train_feed, self.validation_feed, self.test_feed) if feed is not None]

    def feed_notes(self) -> list[str]:
        """What the feeds, and what was loaded from them, have to tell the user since the last call."""
        own = self.notes.copy()
        self.notes.clear()
        return own + list(dict.fromkeys(note for feed in self.feeds for note in feed.take_notes()))

    def close_feeds(self) -> None:
        """End the threads and processes of all feeds."""
        for feed in self.feeds:
            feed.close()

    def final_states(self, cursor: int, excluded: Sequence[int] = (), ema: bool = True) -> list[State]:
        """State dicts of what a run produces: the average model or its EMA, or every independent learner.

        Args:
            cursor: samples seen, from where in the stream recalibration takes its training batches.
            excluded: this device's learners whose BatchNorm statistics, and weights, are not to be used.
            ema: take the EMA, where there is one.

        All ranks call it together, and have the same.
        """
        if not self.rule.has_central_model:
            return [self.bank.learner_state(learner) for learner in range(self.bank.num_learners)]
        state = self._central_state(excluded)
        if self.average_ema is not None and ema:
            state = self.average_ema.at(state, cursor)
        return [self._recalibrated(state, cursor) if self.rule.batch_norm == "recalibrate" else state]

    def _recalibrated(self, state: State, cursor: int) -> State:
        """With BatchNorm's statistics measured anew; as it is where the training batches cannot be loaded."""
        share = range(self.ranks.rank, self.rule.recalibration_batches, self.ranks.num_ranks)
        starts = [cursor + number * self.train_feed.batch_size for number in share]
        try:
            with contextlib.closing(self.train_feed.aside(starts)) as batches:
                return self.evaluator.recalibrate(state, (batch.inputs for batch in batches), self.ranks)
        except CrossbowError as error:
            if not is_of_data(error):
                raise
            self.notes.append(f"BatchNorm's statistics are means of the learners', not measured anew: {error}")
            return state

    def _central_state(self, excluded: Sequence[int]) -> State:
        """State dict of z, where nodes have one each of their mean; by some rules of the learners as they are."""
        state = self.bank.central_state(excluded, self.ranks.adder)
        if self.rule.shows_mean and not self.bank.is_single:
            return {**state, **mean_of_learners(self.bank, self.collective, excluded).shaped()}
        if not self.collective.apart:
            return state
        z = self.bank.new_flat()
        z.copy_row(0, self.bank.z)
        self.collective.mean_over_nodes(z.storage)
        return {**state, **z.shaped()}

    def move_ema(self, samples: int, excluded: Sequence[int] = ()) -> None:
        """Let the EMA of z follow it after so many samples; drained, all ranks together. For `excluded` see above."""
        assert self.average_ema is not None, "nothing asks for an EMA"
        self.average_ema.move(self._central_state(excluded), samples)

    def evaluate(
        self, feed: Feed, cursor: int, excluded: Sequence[int] = ()
    ) -> tuple[Evaluation, tuple[Evaluation, ...]]:
        """What stops look at, and each learner's evaluation when they are independent (the first is their mean).

        All ranks call it together; each measures a share of the samples.
        """
        states = self.final_states(cursor, excluded)
        each = tuple(
            self.evaluator.evaluate(state, feed, self.ranks, examples=number == 0)
            for number, state in enumerate(states)
        )
        return (each[0], ()) if self.rule.has_central_model else (mean_evaluation(each), each)


def smoothing_rows(share: float, bank: ReplicaBank) -> Tensor | None:
    """The label smoothing of every row of a bank; None for none."""
    return torch.full((bank.capacity,), share, dtype=bank.precision.master, device=bank.device) if share else None
