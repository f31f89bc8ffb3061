"""The training loop, which reads as a timeline.

Plan a round, submit it, absorb the outcome of the one before; when an epoch closes, wait for what is in flight,
evaluate and record; write checkpoints when due; stop when told to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from torch import nn

from crossbow_py import checkpoint_writer
from crossbow_py.engine.auto_tuner import Decision
from crossbow_py.engine.memory import free_memory, is_out_of_memory
from crossbow_py.engine.rounds import RoundOutcome
from crossbow_py.errors import CrossbowError, DataError, LearnerError, NonFiniteError, UserError
from crossbow_py.evaluation import Evaluation
from crossbow_py.reporter import Reporter, epoch_record, run_info
from crossbow_py.run import Run
from crossbow_py.signals import StopSignal
from crossbow_py.stopping import StopConditions
from crossbow_py.supply import WorkerSupply
from crossbow_py.telemetry.events import Listener, Summary
from crossbow_py.telemetry.throughput import ThroughputMeter


@dataclass(frozen=True)
class Result:
    """What `fit` returns. `model` is the average model in float32; `models` the learners' when they are independent."""

    status: str
    stop_reason: str
    test_accuracy: float | None
    images_per_s: float
    model: nn.Module
    models: list[nn.Module]
    summary: Summary


class TrainingLoop:
    """One call of `fit`. A context manager: leaving it stops the executor and closes the listeners."""

    def __init__(self, run: Run, stops: StopConditions, listeners: Sequence[Listener]) -> None:
        self.job, self.parts, self.settings, self.state, self.stops = run, run.parts, run.settings, run.state, stops
        self.num_samples, self.total_samples = run.num_samples, stops.planned_samples(run.num_samples)
        run.schedule.factor(0, self.num_samples, self.total_samples)  # refuses what it cannot do, before training
        self._measured = "validation" if self.parts.validation_feed else "test"
        if stops.needs_evaluation and not (self.parts.validation_feed or self.parts.test_feed):
            raise UserError(
                "target_accuracy and target_loss are measured on data, got neither test_data nor validation_data; "
                "give one of them."
            )
        self.meter = ThroughputMeter()
        self.reporter = Reporter(listeners, self.meter)
        self.executor = self.parts.new_executor(self.settings.seed)
        self.learning_rate = 0.0
        self._told: set[str] = set()
        self._final: tuple[Evaluation, tuple[Evaluation, ...]] | None = None
        self._last_checkpoint_s = self.state.elapsed_s
        self._last_checkpoint_samples: int | None = None

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, DataError):
            self._keep_what_is_trained()
        self.executor.close()
        self.parts.close_feeds()
        if error is not None and self.reporter.started:
            status, reason = _how_it_failed(error)
            self.reporter.summarize(self.state, status, reason, None, None)
        self.reporter.close()
        return False

    def start(self, messages: Sequence[str]) -> None:
        """Announce the run and what has to be said about it."""
        self.reporter.start(run_info(self.job, self.total_samples), self.state.wall_s)
        for message in messages:
            self.reporter.message(message)
        self.meter.start(self.state.elapsed_s)
        if self.job.supply:
            self.job.supply.start()

    def run(self, signals: StopSignal) -> tuple[str, str]:
        """Train until something says stop. Returns (status, reason)."""
        try:
            return self._train(signals)
        except DataError:
            if not signals.status:  # else it went to the processes that make batches too
                raise
            return self._stopped_by(signals)

    def _train(self, signals: StopSignal) -> tuple[str, str]:
        state, stops = self.state, self.stops
        first_round = state.round_index
        if state.last_recorded == state.samples_seen and (reason := self._target_reached()):
            return "target_reached", reason
        while True:
            if reason := self._end_epoch():
                return "target_reached", reason
            if state.round_index > first_round and self._checkpoint_is_due():
                self._write_checkpoint()
            if signals.status:
                return self._stopped_by(signals)
            seconds = self.meter.elapsed_s
            if reason := stops.after_round(state.samples_seen, self.num_samples, seconds, state.round_index):
                if self.job.resumed_from and state.round_index == first_round:
                    self.reporter.message(f"Nothing is left to train: the run had reached {reason}; allow more of it.")
                return "finished", reason
            self._run_round(signals)

    def _checkpoint_is_due(self) -> bool:
        every_s = self.job.checkpoints.every_s
        return every_s is not None and self.meter.elapsed_s - self._last_checkpoint_s >= every_s

    def _stopped_by(self, signals: StopSignal) -> tuple[str, str]:
        assert signals.status is not None, "a signal has come"
        reason = StopSignal.REASONS[signals.status]
        self.reporter.message(f"{reason}: stopping. Ctrl-C now aborts at once, without another checkpoint.")
        return signals.status, reason

    def _end_epoch(self) -> str | None:
        """Once all its samples are seen: close it, write its checkpoint. Returns why that ends the run, if it does."""
        state, every = self.state, self.job.checkpoints.every_epochs
        if state.samples_seen < (state.closed_epochs + 1) * self.num_samples:
            return None
        self._close_epoch()
        reason = self._target_reached()
        if not reason and every and state.closed_epochs % every == 0:
            self._write_checkpoint()
        return reason

    def _target_reached(self) -> str | None:
        return self.stops.after_evaluation(self.state.last_accuracy, self.state.last_loss)

    def _run_round(self, signals: StopSignal) -> None:
        state, schedule = self.state, self.job.schedule
        start = state.samples_seen
        bank = self.parts.bank
        factor = schedule.factor(start, self.num_samples, self.total_samples)
        plan = self.parts.plan(state.round_index, start, factor)
        self._await_batches(plan.starts, signals)
        if signals.status:
            return
        restarts = self.parts.rule.restart_on_drop and bank.num_learners > 1
        if restarts and schedule.drops_between(state.last_round_start, start, self.num_samples):
            self._restart()
            plan = self.parts.plan(state.round_index, start, factor)  # memory may have taken learners away meanwhile
        if not self._attempt(lambda: self.executor.submit(plan)):
            return
        state.round_index, state.last_round_start = state.round_index + 1, start
        state.samples_seen += self.job.samples_per_round
        images = self.settings.batch_size * bank.num_learners
        if state.sick_learners:
            self._reseed()
        self.learning_rate = plan.learning_rates[0]
        self.meter.update(images)
        self.reporter.progress(
            state, self.learning_rate, self.total_samples, bank.num_learners, self.stops.max_time_s
        )
        self._tell_notes()
        if self.job.supply:
            self._supply(self.job.supply)
        if self.job.tuning and (decision := self.job.tuning.after_round(images, self.meter.elapsed_s)):
            self._follow(decision)

    def _await_batches(self, starts: Sequence[int], signals: StopSignal) -> None:
        """Block until a round's batches are there, or a signal comes.

        Only time in which nothing is in flight counts as waiting for them. Raises DataError when they cannot be made;
        the round has not begun then.
        """
        feed = self.parts.train_feed
        if not feed.announce(starts):
            self.executor.settle()
            with self.meter.waiting():
                feed.wait(starts, until=lambda: signals.status is not None)

    def _tell_notes(self) -> None:
        for note in [*self.executor.notes, *self.parts.feed_notes()]:
            if note not in self._told:  # every change of the number of learners makes a new executor
                self.reporter.message(note)
            self._told.add(note)
        self.executor.notes.clear()

    def _supply(self, supply: WorkerSupply) -> None:
        """Let the number of workers be corrected."""
        batches = self.state.samples_seen // self.settings.batch_size
        if said := supply.after_round(self.meter.elapsed_s, self.meter.waited_s, batches):
            self.reporter.message(said)
            self.reporter.workers(self.parts.train_feed.num_workers)

    def _follow(self, decision: Decision) -> None:
        """Do what the auto-tuner decided."""
        if decision.reason:
            self.reporter.decision(decision, self.state.samples_seen)
        # A drain in which memory ran out has taken learners away itself, which overrules the decision.
        if decision.num_learners != self.parts.bank.num_learners and self._drain():
            self._set_learners(decision.num_learners)

    def _set_learners(self, num_learners: int) -> None:
        """Grow or shrink the bank under a new executor; what memory does not hold, the auto-tuner takes back."""
        bank, given_up = self.parts.bank, False
        self.executor.close()
        self._reseed_sick()
        while True:
            try:
                bank.resize(num_learners)
                if given_up:
                    bank.trim()
                self.executor = self.parts.new_executor(self.settings.seed)
                return
            except (RuntimeError, MemoryError) as error:
                if num_learners == 1 or not is_out_of_memory(error):
                    raise
            # Out of the except block, the error is gone, and with it what its frames held.
            num_learners, given_up = self._give_up_learners(), True

    def _give_up_learners(self) -> int:
        """How many learners memory may hold, after it did not hold the last number."""
        assert self.job.tuning is not None, "only the auto-tuner changes the number of learners"
        free_memory(self.parts.choices.device)
        decision = self.job.tuning.out_of_memory()
        self.reporter.decision(decision, self.state.samples_seen)
        return decision.num_learners

    def _attempt(self, work: Callable[[], Sequence[RoundOutcome]]) -> bool:
        """Absorb what the executor yields. False when memory did not hold the learners, and some were taken away.

        What the others had done in that round stays; its losses are not counted.
        """
        try:
            self._absorb(work())
            return True
        except LearnerError as error:
            tuned = self.job.tuning is not None and self.parts.bank.num_learners > 1
            if not tuned or not is_out_of_memory(error.__cause__):
                raise
        self.executor.close()
        self._set_learners(self._give_up_learners())
        return False

    def _restart(self) -> None:
        self._drain()
        self.parts.bank.restart(self.parts.rule.restart_momentum)
        self.reporter.message("The learning rate dropped: learners restart from the average model.")

    def _drain(self) -> bool:
        """Wait for what is in flight; the bank may be read and changed afterwards. For the result see `_attempt`."""
        return self._attempt(self.executor.drain)

    def _absorb(self, outcomes: Sequence[RoundOutcome]) -> None:
        """Count losses; note learners that were gated, or stop for them."""
        for outcome in outcomes:
            self.state.absorb(outcome)
            sick = outcome.non_finite_learners
            # With every learner gone there is nothing healthy to clone, so reseeding would loop for ever.
            everyone = len(self.state.sick_learners) == self.parts.bank.num_learners
            if sick and (self.settings.on_nonfinite == "stop" or everyone):
                raise NonFiniteError(sick[0], outcome.plan.index, self.job.newest_checkpoint(), everyone)

    def _reseed(self) -> None:
        """Clone learners that were gated from z, after the round behind theirs.

        That round has been submitted whether or not something waited for the outcome in between (an epoch's end, a
        checkpoint), so that a run takes the same course wherever its checkpoints lie.
        """
        self._drain()
        self._reseed_sick()

    def _reseed_sick(self) -> None:
        """The same, when nothing is in flight."""
        sick, self.state.sick_learners = self.state.sick_learners, {}
        healthy = [learner for learner in range(self.parts.bank.num_learners) if learner not in sick]
        for learner, round_index in sorted(sick.items()):
            self.parts.bank.reseed(learner, healthy)
            self.reporter.message(
                f"Learner {learner} went non-finite in round {round_index} and was reseeded from the average model."
            )
        self.state.num_reseeded += len(sick)

    def _close_epoch(self) -> None:
        """Wait, evaluate, record, and start the next epoch."""
        self._drain()
        self.meter.pause()
        state = self.state
        measured = self.job.evaluate(self._measured)
        state.elapsed_s = self.meter.elapsed_s
        if measured:
            state.note_evaluation(measured[0].accuracy, measured[0].loss, self.stops.target_accuracy)
        self._final = measured if self._measured == "test" else None
        self.reporter.epoch(epoch_record(self.job, self.meter.lap(), self.learning_rate, measured, self._measured))
        state.last_recorded = state.samples_seen
        state.close_epoch(self.num_samples)
        self.meter.resume()

    def _write_checkpoint(self) -> None:
        """Wait for what is in flight and write. A disk that refuses is reported, and training goes on."""
        if self.job.output_dir is None:
            return
        self._drain()
        self.meter.pause()
        state = self.state
        state.elapsed_s, state.wall_s = self.meter.elapsed_s, self.reporter.wall_s
        self._last_checkpoint_s = state.elapsed_s
        try:
            path = checkpoint_writer.save(
                self.job.output_dir, self.job.state_dict(), state.samples_seen, self.job.checkpoints.keep
            )
            self._last_checkpoint_samples = state.samples_seen
            self.reporter.checkpoint(str(path), state.samples_seen)
        except OSError as error:
            self.reporter.message(f"No checkpoint was written ({error}); training goes on, make room soon.")
        self.meter.resume()

    def _keep_what_is_trained(self) -> None:
        """The data failed, not what was learned from it."""
        with suppress(CrossbowError):
            if self._last_checkpoint_samples != self.state.samples_seen:
                self._write_checkpoint()
            if newest := self.job.newest_checkpoint():
                self.reporter.message(f"What was trained is in {newest}; the same command with resume=auto goes on.")

    def finish(self, status: str, reason: str) -> Result:
        """Evaluate what is not yet evaluated, write the last checkpoint and the model, and sum up."""
        self._drain()
        stopped_by_signal = status in StopSignal.REASONS
        if self.state.last_recorded != self.state.samples_seen:
            self._final = None  # of an earlier model
            if not stopped_by_signal:
                self._close_partial_epoch()
                if target := self._target_reached():
                    status, reason = "target_reached", target
        if self._last_checkpoint_samples != self.state.samples_seen:
            self._write_checkpoint()
        self.meter.pause()
        if self._final is None and not stopped_by_signal:
            self._final = self.job.evaluate("test")
        models = self.job.models()
        model_path = self.job.save_models(models)
        summary = self.reporter.summarize(self.state, status, reason, self._final, model_path)
        independent = [] if self.parts.rule.has_central_model else models
        return Result(
            status, reason, summary.test_accuracy, summary.images_per_s, models[0], independent, summary
        )

    def _close_partial_epoch(self) -> None:
        """Record where a run stopped inside an epoch; the epoch's sums are kept, for a resume with a later stop."""
        kept = self.state.to_plain()
        self._close_epoch()
        for name in ("closed_epochs", "loss_sum", "num_losses", "num_correct"):
            setattr(self.state, name, kept[name])


def _how_it_failed(error: BaseException) -> tuple[str, str]:
    """Status and reason of a run that an exception ended."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Ctrl-C, aborted"
    return "failed", "non_finite" if isinstance(error, NonFiniteError) else type(error).__name__
