"""The training loop, which reads as a timeline.

Await the batches of a round, synchronise the ranks, plan the round and take its step; when an epoch closes, drain the
executor, evaluate and record; write checkpoints when due; stop when told to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal

from crossbow_py.core.errors import (
    CrossbowError,
    DataError,
    LearnerError,
    NonFiniteError,
    RankError,
    UserError,
    is_of_data,
)
from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.core.signals import StopSignal
from crossbow_py.distributed.synchronisation import Report, SynchronisationSchedule, agree, signal_number
from crossbow_py.engine.auto_tuner import Decision
from crossbow_py.engine.rounds import Round
from crossbow_py.train.checkpoints.checkpoint import newest_checkpoint
from crossbow_py.train.checkpoints.manager import CheckpointManager
from crossbow_py.train.checkpoints.weights import SavedModels, save_models
from crossbow_py.train.checks.remarks import remarks_on_length
from crossbow_py.train.evaluation.current_models import current_models, model_samples, move_ema
from crossbow_py.train.evaluation.epoch_end import EpochEnd
from crossbow_py.train.loop.average_model import check_z
from crossbow_py.train.loop.learners import Learners, compare_alone
from crossbow_py.train.loop.planning import batch_starts, compares_alone, next_round, seesaw_decision
from crossbow_py.train.loop.round_listener import RoundListener
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Reporter, Result, run_info
from crossbow_py.train.run_settings import StopConditions


class TrainingLoop:
    """One call of `fit`. A context manager: leaving it stops the executor and closes the listeners.

    Every rank has its own loop, and all make the same decisions: an event on one rank takes effect after the next
    synchronisation (`distributed.synchronisation`).

    Args:
        run: the run.
        stops: when it ends.
        reporter: passes events on to listeners.
        exchange: returns the reports of all ranks, which call it together.
        told: the messages that need not be told again.
    """

    def __init__(
        self,
        run: Run,
        stops: StopConditions,
        reporter: Reporter,
        exchange: Callable[[Report], list[Report]],
        told: set[str],
    ) -> None:
        self._run, self.settings, self.state, self.stops = run, run.settings, run.state, stops
        self.ranks, self.reporter, self.meter = run.ranks, reporter, reporter.meter
        self.num_samples, self.total_samples = run.num_samples, stops.planned_samples(run.num_samples)
        run.schedule.factor(0, self.num_samples, self.total_samples)  # raises before training, if at all
        measured = run.validation_feed or run.test_feed
        stops.check_measured(
            measured is not None, lambda: measured is not None and run.evaluator.counts_correct(measured)
        )
        # Clocks of ranks differ, but decisions by time must not: all continue from the slowest one's.
        self.state.elapsed_s = max(elapsed_s for (elapsed_s,) in self.ranks.gather([self.state.elapsed_s]))
        self.learners = Learners(run, reporter)
        self.checkpoints = CheckpointManager(run, reporter)
        self._epochs = EpochEnd(run, reporter, self.meter, stops)
        self._exchange, self._told = exchange, told
        self._told.update(run.warnings)
        self._round_listeners: list[RoundListener] = []
        self.learning_rate = 0.0
        self._agreed = agree([Report(self.state.elapsed_s)])
        self._synchronisation = SynchronisationSchedule(self.state.round_index)
        self._images = 0  # trained on by all ranks since the last synchronisation
        self._failure: DataError | None = None

    def attach(self, listener: RoundListener) -> None:
        """Call a listener between rounds from now on."""
        self._round_listeners.append(listener)

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        watch = self.ranks.watch
        if error is None or not watch.is_ending:
            watch.folder = watch.record = None
        if is_of_data(error) or (isinstance(error, UserError) and self._is_evaluating):
            self._save_after_data_error()
        elif error is not None and self.ranks.num_ranks == 1:
            self.checkpoints.settle()  # what is being written precedes the error
        for listener in self._round_listeners:
            listener.stop()
        self.learners.close()
        self.checkpoints.close()
        self._run.close_feeds()
        # A rank that is lost because others end, as one hangs, is not what ended the run.
        if error is not None and self.reporter.started and not watch.is_ending:
            status, reason = _failure_status(error)
            self.reporter.summarize(self.state, status, reason, None, SavedModels(None, {}))
        self.reporter.close()
        return False

    def train(self, messages: list[str], signals: StopSignal) -> Result:
        """Train until a stop condition is met or a signal comes, and return the result; `messages` are told first."""
        self.start(messages)
        return self.finish(*self.run(signals))

    def start(self, messages: list[str]) -> None:
        """Announce the run, and pass on the messages about it, which are removed once they are told."""
        self.state.returned_best = False
        with self.ranks.together():  # as a logger may not reach its server
            self.reporter.start(run_info(self._run, self._planned_samples), self.state.wall_s)
        remarks = [each for each in remarks_on_length(self._run, self.total_samples) if each not in self._told]
        self._told.update(remarks)
        for message in [*messages, *remarks, *self._epochs.begin()]:
            self.reporter.message(message)
        messages.clear()
        self.meter.start(self.state.elapsed_s)
        for listener in self._round_listeners:
            listener.start()
        self.ranks.watch.folder, self.ranks.watch.record = self._run.output_dir, self._record_hang
        self.ranks.watch.start()

    def _record_hang(self, hanging: Sequence[HangingRank], sentence: str) -> None:
        """Record for all ranks that some hang. Called by a thread of the watch, while this loop waits for them."""
        self.reporter.record_hang(self.state, self._run.output_dir, hanging, sentence)

    def run(self, signals: StopSignal) -> tuple[str, str]:
        """Train until a stop condition is met or a signal comes. Returns (status, reason)."""
        state, first_round = self.state, self.state.round_index
        if state.last_recorded == state.samples_seen and (reason := self._stop_after_evaluation()):
            self._check_trained(reason, first_round)
            return _status_of(reason), reason
        while True:
            if reason := self._end_epoch():
                return _status_of(reason), reason
            if not self._end_reached():
                if (decision := seesaw_decision(self._run, self.total_samples)) is not None:
                    self._apply(decision)
                self._await_batches(signals)
            self._synchronise(signals)
            # While one is being written, training would have to wait for it.
            may_write = state.round_index > first_round and not any(self._agreed.checkpoints)
            if may_write and self.checkpoints.is_due(self._agreed.elapsed_s):
                self._write_checkpoint()
            if signal := self._agreed.signal:
                reason = StopSignal.REASONS[signal]
                self.reporter.message(f"{reason}: stopping. Ctrl-C now aborts at once, without another checkpoint.")
                return signal, reason
            if self._agreed.fails:
                self.ranks.raise_any(self._failure)
            if reason := self._end_reached():
                self._check_trained(reason, first_round)
                return "finished", reason
            plan = next_round(self._run, self.total_samples)
            self._prepare(plan)
            self._finish(plan, counts=self.step(plan))

    def step(self, plan: Round) -> bool:
        """Submit a round, and absorb the outcome of the one before. Returns whether it counts.

        A round that did not fit in memory is planned again with fewer learners; but not on several ranks, because the
        others have gone on: this rank then learns nothing from its samples.
        """
        learners = self.learners
        learners.in_flight = True
        if learners.memory.sits_out:
            learners.memory.sit_out(plan)
            return True
        learners.memory.submitted(plan)
        try:
            for outcome in learners.executor.submit(plan):
                self.state.absorb(outcome)
            if plan.outer_step is not None:
                learners.take_outer_step(plan)
            return True
        except LearnerError as error:
            learners.memory.check(error)
        # Outside the except block the error is gone, and with it the memory that its frames held.
        learners.sit_out()
        return not self._run.collective.is_alone

    def _prepare(self, plan: Round) -> None:
        """Do what precedes a round: restarts of learners from z, and the comparison of a single learner's gradients."""
        run, progress = self._run, self._run.progress
        self.ranks.watch.doing = f"round {plan.index}"
        restarts = run.rule.restarts(run.bank.total_learners, run.bank.num_devices)
        if restarts and run.schedule.drops_between(self.state.last_round_start, progress, self.num_samples):
            self._drain()
            self.learners.restart()
        if compares_alone(run, plan):
            self._drain()
            compare_alone(run, plan)

    def _finish(self, plan: Round, counts: bool) -> None:
        """Count a round, unless it is to be planned again, and do what is due before the next."""
        run, state, start = self._run, self.state, self.state.samples_seen
        if self.ranks.num_ranks == 1:
            self._handle_lost_learners(len(state.non_finite_learners), self.learners.memory.sits_out)
        if not counts:
            return
        factor = run.schedule.warmed_up_factor(run.progress, self.num_samples, self.total_samples)
        state.note_round(run.samples_per_round, run.progress, factor, plan.averages, run.bank.total_learners)
        images = self.settings.samples_per_step * run.bank.total_learners
        self._images += images
        if len(state.non_finite_learners) if self.ranks.num_ranks == 1 else self._agreed.num_non_finite:
            self._reseed()
        self._check_and_average_z(start)
        self.learning_rate = plan.learning_rates[0]
        self.meter.update(images)
        last = self._last_sample
        self.reporter.progress(state, self.learning_rate, last, run.bank.num_learners, self.stops.max_time_s)
        self._tell_notes()
        for listener in self._round_listeners:
            if (decision := listener.after_round(images)) is not None:
                self._images = 0  # the auto-tuner does not count this round
                self._apply(decision)

    @property
    def _planned_samples(self) -> int | None:
        """The samples at which the run ends; None if that is not known."""
        return None if self.settings.count_effective_samples else self.total_samples

    @property
    def _last_sample(self) -> int | None:
        """The samples at which the run ends as things are, also by `max_rounds`."""
        planned, most = self._planned_samples, self.stops.max_rounds
        if most is None:
            return planned
        by_rounds = self.state.samples_seen + max(0, most - self.state.round_index) * self._run.samples_per_round
        return by_rounds if planned is None else min(planned, by_rounds)

    def _end_reached(self) -> str | None:
        state = self.state
        progress = self._run.progress
        return self.stops.after_round(progress, self.num_samples, self._agreed.elapsed_s, state.round_index)

    def _check_trained(self, reason: str, first_round: int) -> None:
        """Report a resumed run that had nothing left to train. Raises UserError if nothing was ever trained."""
        if not self.state.round_index:
            limit = getattr(self.stops, reason)
            raise UserError(f"{reason}={limit:g} was reached before the first round, so nothing was trained; raise it.")
        if self._run.resumed_from and self.state.round_index == first_round:
            self.reporter.message(f"Nothing is left to train: the run had reached {reason}; allow more of it.")

    @property
    def _is_evaluating(self) -> bool:
        return self.ranks.num_ranks == 1 and self._epochs.is_evaluating

    def _end_epoch(self) -> str | None:
        """Close the epoch once all its samples are seen. Returns the stop that its evaluation reached, if any.

        Evaluations within an epoch come here, too; they only depend on the samples seen, and change nothing.
        """
        state, every = self.state, self._run.arguments.checkpoint.every_epochs
        if state.samples_seen < (state.closed_epochs + 1) * self.num_samples:
            return self._stop_after_evaluation() if self._evaluate_within() else None
        self._drain()
        self._epochs.close(self.learning_rate)
        if state.closed_epochs.bit_count() == 1:  # after epochs 1, 2, 4, ...: it costs a round or two
            self.meter.pause()
            self.learners.recheck()
            self._tell_notes()
            self.meter.resume()
        reason = self._stop_after_evaluation()
        if not reason and every and state.closed_epochs % every == 0:
            self._write_checkpoint()
        return reason

    def _evaluate_within(self) -> bool:
        """Evaluate if another part of the epoch is over. Returns whether it was."""
        state, parts = self.state, self.settings.evaluations_per_epoch
        ended, recorded = (max(0, at) * parts // self.num_samples for at in (state.samples_seen, state.last_recorded))
        if ended <= recorded:
            return False
        self._drain()
        self._epochs.close(self.learning_rate)
        return True

    def _stop_after_evaluation(self) -> str | None:
        state = self.state
        return self.stops.after_evaluation(state.last_accuracy, state.last_loss, state.num_stale)

    def _await_batches(self, signals: StopSignal) -> None:
        """Block until the next round's batches are loaded or a signal comes; keep the error if they cannot be loaded.

        Only time in which nothing is in flight counts as waiting for them.
        """
        feed, starts = self._run.train_feed, batch_starts(self._run, self.state.samples_seen)
        self.ranks.watch.doing = f"waiting for the data of round {self.state.round_index}"
        try:
            if not feed.announce(starts):
                self.learners.settle()
                with self.meter.waiting():
                    feed.wait(starts, until=lambda: signals.status is not None)
        except DataError as error:
            self._failure = error

    def _synchronise(self, signals: StopSignal) -> None:
        """Exchange reports with the other ranks, when due, and act on what all of them report."""
        if not self._synchronisation.is_due(self.state.round_index):
            return
        noise = self.state.noise
        sums = (0, 0, 0) if noise is None else noise.sums(self.state.take_compared())
        report = Report(
            elapsed_s=self.meter.elapsed_s,
            signal=signal_number(signals.status),
            fails=self._failure is not None,
            out_of_memory=self.learners.memory.sits_out,
            num_non_finite=len(self.state.non_finite_learners),
            checkpoint=self.checkpoints.status,
            on_trial=any(listener.on_trial for listener in self._round_listeners),
            gradient_variance=sums[0],
            squared_gradient=sums[1],
            num_compared=sums[2],
        )
        self._agreed, before_s = agree(self._exchange(report)), self._agreed.elapsed_s
        if noise is not None:
            self.state.noise = noise.after_sums(*self._agreed.compared)
        by_noise = self._run.rule.scales_by_gain or self.settings.count_effective_samples  # so no clock may decide
        every_round = self.ranks.num_ranks == 1 or self._run.train_feed.STREAMS or by_noise
        period = self._run.rule.averaging_period
        self._synchronisation.synchronised(
            self.state.round_index, self._agreed.elapsed_s - before_s, period, every_round
        )
        self.checkpoints.follow(self._agreed.checkpoints)
        if self._handle_lost_learners(self._agreed.num_non_finite, self._agreed.out_of_memory):
            self._tune_learners()

    def _handle_lost_learners(self, num_non_finite: int, out_of_memory: bool) -> bool:
        """Stop the run for non-finite learners, or remove those that did not fit in memory. Returns whether all fitted.

        Raises NonFiniteError, or RankError on other ranks.
        """
        # If all learners are non-finite there is no finite one to clone, so reseeding would loop for ever.
        all_non_finite = num_non_finite == self._run.bank.total_learners
        if num_non_finite and (self.settings.on_nonfinite == "stop" or all_non_finite):
            self.checkpoints.settle()
            non_finite, failure = self.state.non_finite_learners, None
            if non_finite:
                (learner, round_index), first = next(iter(non_finite.items())), self._run.bank.first_learner
                newest = newest_checkpoint(self._run.output_dir)
                failure = NonFiniteError(first + learner, round_index, newest, all_non_finite, self.learning_rate)
            self.ranks.raise_any(failure)
        if out_of_memory:
            self.learners.shrink()
        return not out_of_memory

    def _tune_learners(self) -> None:
        """Give the auto-tuner the images and the time since the last synchronisation."""
        images, self._images = self._images, 0
        if not self._run.tuning or not images:
            return
        if self._agreed.on_trial:
            self._run.tuning.interrupt()
            return
        if decision := self._run.tuning.after_round(images, self._agreed.elapsed_s, self.state.noise):
            self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        if decision.reason:
            self.reporter.decision(decision, self.state.samples_seen)
        # If memory runs out in the drain, that removes learners itself and overrules the decision.
        if decision.num_learners != self._run.bank.num_learners and self._drain():
            self.learners.resize(decision.num_learners)

    def _check_and_average_z(self, before: int) -> None:
        """Compare z over ranks and update its EMA, each when due, after a round that began at `before` samples."""
        ema, every = self._run.average_ema, self._run.arguments.distributed.check_every_rounds
        if self.state.round_index % every == 0 and self.ranks.num_ranks > 1:
            self._drain()
            check_z(self._run)
        if ema is not None and ema.is_due(before, self.state.samples_seen, self.num_samples):
            self._drain()
            with self.learners.executor.span_between("average EMA", self.state.round_index - 1):
                move_ema(self._run)

    def _tell_notes(self) -> None:
        """Pass on messages of the executor, the data and the run, each once."""
        for note in self.learners.take_notes():
            if note not in self._told:  # every change of the number of learners makes a new executor
                self.reporter.message(note)
            self._told.add(note)

    def _drain(self) -> bool:
        """Wait for what is in flight; the bank may be read and changed afterwards. All ranks together.

        Returns False if the learners did not fit in the memory of some rank, and some were removed.
        """
        self.learners.drain()
        with self.ranks.together():
            self._run.bank.check_bindings(self.settings.averages(self._run.rule, self.ranks.num_ranks))
        own = len(self.state.non_finite_learners), self.learners.memory.sits_out
        num_non_finite, out_of_memory = self.ranks.sum(own)
        self._agreed = dataclasses.replace(self._agreed, num_non_finite=int(num_non_finite))
        return self._handle_lost_learners(int(num_non_finite), bool(out_of_memory))

    def _reseed(self) -> None:
        """Reseed gated learners from z, after the round that follows theirs.

        That round is always submitted first, even if an epoch's end or a checkpoint waited for the outcome in between.
        So a run takes the same course wherever its checkpoints are.
        """
        self._drain()
        self.learners.reseed()
        self._agreed = dataclasses.replace(self._agreed, num_non_finite=0)

    def _write_checkpoint(self) -> None:
        """Drain, copy the state, and go on while it is written. A disk error is reported, and training goes on."""
        if self._run.output_dir is None:
            return
        self._drain()
        check_z(self._run)
        self.meter.pause()
        self.state.elapsed_s, self.state.wall_s = self.meter.elapsed_s, self.reporter.wall_s
        self.checkpoints.begin(self._agreed.elapsed_s)
        self.meter.resume()

    def _save_after_data_error(self) -> None:
        """Write a checkpoint: the data failed, but what was learned is intact."""
        with suppress(CrossbowError):
            if not self.checkpoints.has(self.state.samples_seen):
                self._write_checkpoint()
            self.checkpoints.settle()
            if newest := newest_checkpoint(self._run.output_dir):
                self.reporter.message(f"What was trained is in {newest}; the same command with resume=auto goes on.")

    def finish(self, status: str, reason: str) -> Result:
        """Evaluate if that is still due, write the last checkpoint and the model, and return the result."""
        self._drain()
        stopped_by_signal = status in StopSignal.REASONS
        if self.state.last_recorded != self.state.samples_seen and not stopped_by_signal:
            self._epochs.close(self.learning_rate, is_stop=True)
            if target := self._stop_after_evaluation():
                status, reason = _status_of(target), target
        if not self.checkpoints.has(self.state.samples_seen):
            self._write_checkpoint()
        self.checkpoints.settle()
        self.meter.pause()
        self.state.returned_best = self.stops.returns_best and self.state.best is not None
        final = self._epochs.final(measures=not stopped_by_signal)
        models, single = current_models(self._run), self._run.rule.has_central_model
        saved = save_models(models, self._run.output_dir, model_samples(self._run), single, self.ranks)
        self._tell_notes()
        summary = self.reporter.summarize(self.state, status, reason, final, saved)
        independent = [] if single else models
        (images_per_s,), *_ = self.ranks.gather([summary.images_per_s])  # of the first rank, as in its records
        measured = summary.test_accuracy, images_per_s
        return Result(status, reason, *measured, models[0], independent, summary, self.reporter.history)


def _status_of(reason: str) -> str:
    """Return the status of a run that its last evaluation ended."""
    return "finished" if reason == "patience" else "target_reached"


def _failure_status(error: BaseException) -> tuple[str, str]:
    """Return the status and reason of a run that an exception ended."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Ctrl-C, aborted"
    kind = error.kind if isinstance(error, RankError) else type(error).__name__
    return "failed", "non_finite" if kind == NonFiniteError.__name__ else kind
