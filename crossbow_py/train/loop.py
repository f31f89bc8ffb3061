"""The training loop, which reads as a timeline.

Plan a round, synchronise the ranks, submit the round, absorb the outcome of the one before; when an epoch closes, drain
the executor, evaluate and record; write checkpoints when due; stop when told to.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, SupportsIndex

from crossbow_py.core.errors import CrossbowError, DataError, NonFiniteError, RankError, UserError, is_of_data
from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.core.signals import StopSignal
from crossbow_py.distributed.synchronisation import Report, SynchronisationSchedule, agree, signal_number
from crossbow_py.engine.auto_tuner import Decision
from crossbow_py.engine.rounds import Round
from crossbow_py.telemetry.events import Listener, RoundEnd
from crossbow_py.telemetry.system import SystemMonitor
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.checkpoints.manager import CheckpointManager
from crossbow_py.train.evaluation.evaluator import State, non_finite_remark
from crossbow_py.train.evaluation.learning_measurement import LearningMeasurement
from crossbow_py.train.rank_telemetry import RankTelemetry
from crossbow_py.train.round_runner import RoundRunner
from crossbow_py.train.run import Measured, Run, SavedModels
from crossbow_py.train.run_folder.reporter import Reporter, Result, epoch_record, run_info
from crossbow_py.train.run_settings import MOST_LEARNERS, StopConditions
from crossbow_py.train.run_state import is_better


class TrainingLoop:
    """One call of `fit`. A context manager: leaving it stops the executor and closes the listeners.

    Every rank has its own loop, and all make the same decisions: an event on one rank takes effect after the next
    synchronisation (`distributed.synchronisation`).
    """

    def __init__(
        self,
        run: Run,
        stops: StopConditions,
        listeners: Sequence[Listener],
        after_round: Callable[[RoundEnd], int | None] | None = None,
        monitor: SystemMonitor | None = None,
    ) -> None:
        self._run, self.settings, self.state, self.stops = run, run.settings, run.state, stops
        self.ranks = run.ranks
        self.num_samples, self.total_samples = run.num_samples, stops.planned_samples(run.num_samples)
        run.schedule.factor(0, self.num_samples, self.total_samples)  # raises before training, if at all
        measured = self._run.validation_feed or self._run.test_feed
        stops.check_measured(
            measured is not None, lambda: measured is not None and self._run.evaluator.counts_correct(measured)
        )
        # Clocks of ranks differ, but decisions by time must not: all continue from the slowest one's.
        self.state.elapsed_s = max(elapsed_s for (elapsed_s,) in self.ranks.gather([self.state.elapsed_s]))
        idle = self.ranks.watch.idle
        self.meter = ThroughputMeter(waited_for_ranks_s=lambda: idle.seconds)
        self._telemetry = RankTelemetry(run, self.meter, monitor)
        self.reporter = Reporter(listeners, self.meter, telemetry=self._telemetry)
        self.rounds = RoundRunner(run, self.reporter)
        self.checkpoints = CheckpointManager(run, self.reporter)
        self._epochs = EpochCloser(run, self.reporter, self.meter, stops)
        self.learning_rate = 0.0
        self._agreed = agree([Report(self.state.elapsed_s)])
        self._synchronisation = SynchronisationSchedule(self.state.round_index)
        self._images = 0  # trained on by all ranks since the last synchronisation
        self._failure: DataError | None = None
        self._after_round = after_round

    def __enter__(self) -> TrainingLoop:
        self._run.in_fit = True
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
        if self._run.busy_cores:
            self._run.busy_cores.stop()
        self.rounds.close()
        self.checkpoints.close()
        self._run.close_feeds()
        self._run.in_fit = False
        # A rank that is lost because others end, as one hangs, is not what ended the run.
        if error is not None and self.reporter.started and not watch.is_ending:
            status, reason = _failure_status(error)
            self.reporter.summarize(self.state, status, reason, None, SavedModels(None, {}))
        self.reporter.close()
        return False

    def start(self, messages: Sequence[str]) -> None:
        """Announce the run, and pass on the messages about it."""
        self._run.returned_best = False
        with self.ranks.together():  # as a logger may not reach its server
            self.reporter.start(run_info(self._run, self._planned_samples), self.state.wall_s)
        remarks = [each for each in self._run.remarks(self.total_samples) if each not in self._run.told]
        self._run.told.update(remarks)
        for message in [*messages, *remarks, *self._epochs.begin()]:
            self.reporter.message(message)
        self.meter.start(self.state.elapsed_s)
        if self._run.worker_autotuner:
            self._run.worker_autotuner.start()
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
            plan = None if self._end_reached() else self._plan()
            if plan:
                self._await_batches(plan, signals)
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
            self._run_round(self._plan())  # anew, by what ranks have just told each other

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
        state, every = self.state, self._run.checkpoints.every_epochs
        if state.samples_seen < (state.closed_epochs + 1) * self.num_samples:
            return self._stop_after_evaluation() if self._evaluate_within() else None
        self._drain()
        self._epochs.close(self.learning_rate)
        if state.closed_epochs.bit_count() == 1:  # after epochs 1, 2, 4, ...: it costs a round or two
            self.meter.pause()
            self.rounds.recheck()
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

    def _plan(self) -> Round:
        state, factor = self.state, self._factor()
        if state.noise is not None and self.ranks.num_ranks == 1:  # else once ranks have agreed
            state.noise = state.noise.after(state.take_compared())
        after = self._run.progress + self._run.samples_per_round
        is_last = self.total_samples is not None and after >= self.total_samples
        apart = state.apart(self._factor(warmed_up=True))
        return self._run.plan(state.round_index, state.samples_seen, factor, *apart, is_last)

    def _factor(self, warmed_up: bool = False) -> float:
        factor = self._run.schedule.warmed_up_factor if warmed_up else self._run.schedule.factor
        return factor(self._run.progress, self.num_samples, self.total_samples)

    def _await_batches(self, plan: Round, signals: StopSignal) -> None:
        """Block until the next round's batches are loaded or a signal comes; keep the error if they cannot be loaded.

        Only time in which nothing is in flight counts as waiting for them.
        """
        feed, starts = self._run.train_feed, plan.starts
        self.ranks.watch.doing = f"waiting for the data of round {plan.index}"
        try:
            if not feed.announce(starts):
                self.rounds.settle()
                with self.meter.waiting():
                    feed.wait(starts, until=lambda: signals.status is not None)
        except DataError as error:
            self._failure = error

    def _synchronise(self, signals: StopSignal) -> None:
        """Exchange reports with the other ranks, when due, and act on what all of them report."""
        if not self._synchronisation.is_due(self.state.round_index):
            return
        noise = self.state.noise
        sums = noise.sums(self.state.take_compared()) if noise is not None and self.ranks.num_ranks > 1 else (0, 0, 0)
        report = Report(
            elapsed_s=self.meter.elapsed_s,
            signal=signal_number(signals.status),
            fails=self._failure is not None,
            out_of_memory=self.rounds.out_of_memory,
            num_non_finite=len(self.state.non_finite_learners),
            checkpoint=self.checkpoints.status,
            on_trial=self._run.busy_cores is not None and self._run.busy_cores.on_trial,
            gradient_variance=sums[0],
            squared_gradient=sums[1],
            num_compared=sums[2],
        )
        self._agreed, before_s = agree(self._telemetry.exchange(report)), self._agreed.elapsed_s
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
                failure = NonFiniteError(first + learner, round_index, self._run.newest_checkpoint(), all_non_finite)
            self.ranks.raise_any(failure)
        if out_of_memory:
            self.rounds.shrink()
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
            self.rounds.set_learners(decision.num_learners)

    def _run_round(self, plan: Round) -> None:
        state, start, bank = self.state, self.state.samples_seen, self._run.bank
        progress = self._run.progress
        self.ranks.watch.doing = f"round {state.round_index}"
        restarts = self._run.rule.restarts(bank.total_learners, bank.num_devices)
        if restarts and self._run.schedule.drops_between(state.last_round_start, progress, self.num_samples):
            self._drain()
            self.rounds.restart()
        if self._run.compares_alone(plan):
            self._drain()
            self._run.compare_alone(plan)
        counts = self.rounds.submit(plan)
        if self.ranks.num_ranks == 1:
            self._handle_lost_learners(len(state.non_finite_learners), self.rounds.out_of_memory)
        if not counts:
            return
        factor = self._factor(warmed_up=True)
        averages = plan.averages
        state.note_round(self._run.samples_per_round, progress, factor, averages, bank.total_learners)
        images = self.settings.samples_per_step * bank.total_learners
        self._images += images
        if len(state.non_finite_learners) if self.ranks.num_ranks == 1 else self._agreed.num_non_finite:
            self._reseed()
        self._check_and_average_z(start)
        self.learning_rate = plan.learning_rates[0]
        self.meter.update(images)
        rate, stops = self.learning_rate, self.stops
        self.reporter.progress(state, rate, self._last_sample, bank.num_learners, stops.max_time_s)
        self.rounds.tell_notes()
        self._tune_host(images)
        if self._after_round is not None:
            self._call_after_round(self._after_round, images)

    def _call_after_round(self, after_round: Callable[[RoundEnd], int | None], images: int) -> None:
        """Call `after_round` of `fit`, and set the number of learners that it returns. Raises UserError."""
        tuning, now = self._run.tuning, self._run.bank.num_learners
        settled = tuning is None or tuning.state.phase == "settled"
        in_effect = tuple(self.rounds.executor.in_effect())
        wanted = after_round(RoundEnd(images, self.meter.elapsed_s, self.meter.waited_s, now, settled, in_effect))
        if wanted is None:
            return
        is_whole = isinstance(wanted, SupportsIndex) and not isinstance(wanted, bool)
        count = operator.index(wanted) if is_whole else 0
        if not 1 <= count <= MOST_LEARNERS:
            raise UserError(
                f"after_round must return None or a whole number of learners from 1 to {MOST_LEARNERS}, got {wanted!r}"
                "; return None to leave their number as it is."
            )
        if tuning is None and count != now:
            raise UserError(
                f"after_round may change the number of learners only with num_learners=auto, got {count} with "
                f"num_learners={now}; set num_learners=auto, or return None."
            )
        self._images = 0  # the auto-tuner does not count this round
        self._apply(Decision("grow" if count > now else "shrink", count))

    def _check_and_average_z(self, before: int) -> None:
        """Compare z over ranks and update its EMA, each when due, after a round that began at `before` samples."""
        ema = self._run.average_ema
        if self.state.round_index % self._run.distributed.check_every_rounds == 0 and self.ranks.num_ranks > 1:
            self._drain()
            self._run.check_z()
        if ema is not None and ema.is_due(before, self.state.samples_seen, self.num_samples):
            self._drain()
            self.rounds.move_ema()

    def _tune_host(self, images: int) -> None:
        """Tune the number of workers, and how threads wait for each other on a busy machine; numbers stay the same."""
        elapsed_s, waited_s = self.meter.elapsed_s, self.meter.waited_s
        if self._run.worker_autotuner:
            batches = self.state.samples_seen // self.settings.samples_per_step // self.ranks.num_ranks
            if said := self._run.worker_autotuner.after_round(elapsed_s, waited_s, batches):
                self.reporter.message(said)
                self.reporter.workers(self._run.train_feed.num_workers)
        busy_cores, num_learners = self._run.busy_cores, self._run.bank.num_learners
        if busy_cores and (said := busy_cores.after_round(images, num_learners, elapsed_s - waited_s)):
            self.reporter.message(said)

    def _drain(self) -> bool:
        """Wait for what is in flight; the bank may be read and changed afterwards. All ranks together.

        Returns False if the learners did not fit in the memory of some rank, and some were removed.
        """
        self.rounds.drain()
        with self.ranks.together():
            self._run.bank.check_bindings(self.settings.averages(self._run.rule, self.ranks.num_ranks))
        num_non_finite, out_of_memory = self.ranks.sum([len(self.state.non_finite_learners), self.rounds.out_of_memory])
        self._agreed = dataclasses.replace(self._agreed, num_non_finite=int(num_non_finite))
        return self._handle_lost_learners(int(num_non_finite), bool(out_of_memory))

    def _reseed(self) -> None:
        """Reseed gated learners from z, after the round that follows theirs.

        That round is always submitted first, even if an epoch's end or a checkpoint waited for the outcome in between.
        So a run takes the same course wherever its checkpoints are.
        """
        self._drain()
        self.rounds.reseed()
        self._agreed = dataclasses.replace(self._agreed, num_non_finite=0)

    def _write_checkpoint(self) -> None:
        """Drain, copy the state, and go on while it is written. A disk error is reported, and training goes on."""
        if self._run.output_dir is None:
            return
        self._drain()
        self._run.check_z()
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
            if newest := self._run.newest_checkpoint():
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
        self._run.returned_best = self.stops.returns_best and self._run.best is not None
        final = self._epochs.final(measures=not stopped_by_signal)
        models = self._run.models()
        saved = self._run.save_models(models)
        self.rounds.tell_notes()
        summary = self.reporter.summarize(self.state, status, reason, final, saved)
        independent = [] if self._run.rule.has_central_model else models
        (images_per_s,), *_ = self.ranks.gather([summary.images_per_s])  # of the first rank, as in its records
        return Result(status, reason, summary.test_accuracy, images_per_s, models[0], independent, summary)


class EpochCloser:
    """Evaluates and records at the end of an epoch, or of a part of it. The training loop drains before each call.

    All ranks together.
    """

    def __init__(self, run: Run, reporter: Reporter, meter: ThroughputMeter, stops: StopConditions) -> None:
        self._run, self._state, self._stops = run, run.state, stops
        self._reporter, self._meter, self._watch = reporter, meter, run.ranks.watch
        self._measured = "validation" if run.validation_feed else "test"
        self._learning = LearningMeasurement(run) if run.settings.learning_statistics else None
        self._final: Measured | None = None
        self.is_evaluating = False

    def begin(self) -> list[str]:
        """Keep the current models, if they were just evaluated. Returns a message if better ones were not kept.

        All ranks together, before the first round.
        """
        run, state = self._run, self._state
        if not self._stops.returns_best or state.last_loss is None:
            return []
        if run.best is None and state.last_recorded == state.samples_seen:
            run.keep_if_best(state.last_accuracy, state.last_loss, run.final_states())
        best_loss = math.nan if state.best_loss is None else state.best_loss
        if run.best and not is_better(state.best_accuracy, best_loss, run.best.accuracy, run.best.loss):
            return []
        return [
            "Earlier models were not kept, as neither patience nor restore_best was set: the best one is looked for "
            "from here on."
        ]

    def close(self, learning_rate: float, is_stop: bool = False) -> None:
        """Evaluate, record with the learning rate of the last round, and start the sums until the next evaluation.

        A stop anywhere else keeps the sums, for a resume with a later stop.
        """
        run, state = self._run, self._state
        run.check_z()
        self._meter.pause()
        self._watch.doing = f"the evaluation after round {state.round_index - 1}"
        states = run.final_states() if run.feed_of(self._measured) else []
        measured = self._evaluate(self._measured, states)
        state.elapsed_s = self._meter.elapsed_s
        if measured:
            accuracy, loss = measured[0].accuracy, measured[0].loss
            state.note_evaluation(accuracy, loss, self._stops.target_accuracy, is_stop)
            if self._stops.returns_best:
                run.keep_if_best(accuracy, loss, states)
        self._final = measured if self._measured == "test" else None
        unsmoothed = None
        if run.average_ema is not None and measured:
            unsmoothed = run.evaluate(self._measured, run.final_states(ema=False))
        learning = None
        if self._learning is not None:
            self._watch.doing = f"the statistics of learning after round {state.round_index - 1}"
            learning = self._learning.measure(self._measured)
            for note in self._learning.take_notes():
                self._reporter.message(note)
        own = state.loss_sum, state.num_losses, state.num_correct
        state.loss_sum, state.num_losses, state.num_correct = run.epoch_sums()
        lap = self._meter.lap()
        record = epoch_record(run, lap, learning_rate, measured, self._measured, learning)
        z_accuracy = unsmoothed[0].accuracy if unsmoothed else None
        self._reporter.epoch(dataclasses.replace(record, z_accuracy=z_accuracy))
        self._reporter.predictions(run, measured, self._measured)
        state.last_recorded = state.samples_seen
        if is_stop:
            state.loss_sum, state.num_losses, state.num_correct = own
        else:
            state.start_sums(run.num_samples)
        self._meter.resume()

    def final(self, measures: bool) -> Measured | None:
        """Return the evaluation of the final model on test data: the last epoch's, or a new one if `measures`."""
        if not self._state.last_recorded == self._state.samples_seen == self._run.model_samples:
            self._final = None  # of another model
        if self._final is None and measures:
            self._final = self._evaluate("test")
        return self._final

    def _evaluate(self, which: str, states: Sequence[State] | None = None) -> Measured | None:
        """Evaluate on the `test` or `validation` data, and report outputs that are not finite."""
        self.is_evaluating = True
        measured = self._run.evaluate(which, states)
        self.is_evaluating = False
        if measured and measured[0].num_non_finite:
            what = f"{which} data after {self._state.samples_seen:,} samples"
            self._reporter.message(non_finite_remark(what, measured[0].num_non_finite, measured[0].num_samples))
        return measured


def _status_of(reason: str) -> str:
    """Return the status of a run that its last evaluation ended."""
    return "finished" if reason == "patience" else "target_reached"


def _failure_status(error: BaseException) -> tuple[str, str]:
    """Return the status and reason of a run that an exception ended."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Ctrl-C, aborted"
    kind = error.kind if isinstance(error, RankError) else type(error).__name__
    return "failed", "non_finite" if kind == NonFiniteError.__name__ else kind
