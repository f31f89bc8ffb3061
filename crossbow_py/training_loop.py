"""The training loop, which reads as a timeline.

Plan a round, submit it, absorb the outcome of the one before; when an epoch closes, wait for what is in flight,
evaluate and record; write checkpoints when due; stop when told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from crossbow_py import checkpoint
from crossbow_py.assembly import Parts
from crossbow_py.data.feed import Feed
from crossbow_py.engine.rounds import RoundOutcome
from crossbow_py.errors import NonFiniteError, UserError
from crossbow_py.evaluation import Evaluation, mean_evaluation
from crossbow_py.reporter import Reporter, correction_norm, replica_spread
from crossbow_py.signals import StopSignal
from crossbow_py.stopping import StopConditions
from crossbow_py.telemetry.events import EpochRecord, Listener, RunInfo, Summary
from crossbow_py.telemetry.throughput import ThroughputMeter

if TYPE_CHECKING:
    from crossbow_py.trainer import Trainer


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

    def __init__(self, trainer: Trainer, stops: StopConditions, listeners: Sequence[Listener]) -> None:
        self.trainer, self.parts, self.settings = trainer, trainer.parts, trainer.settings
        self.state, self.stops = trainer.state, stops
        self.num_samples = self.parts.train_feed.num_samples
        self.total_samples = stops.planned_samples(self.num_samples)
        trainer.schedule.factor(0, self.num_samples, self.total_samples)  # refuses what it cannot do, before training
        _check_targets(self.parts, stops)
        self.meter = ThroughputMeter()
        self.reporter = Reporter(listeners, self.meter)
        self.executor = self.parts.new_executor(self.settings.seed)
        self.learning_rate = 0.0
        self.final: Evaluation | None = None
        self._restarts = self.parts.rule.restart_on_drop and self.settings.num_learners > 1
        self._last_checkpoint_s = self.state.elapsed_s
        self._last_checkpoint_samples: int | None = None

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.executor.close()
        if isinstance(error, NonFiniteError):
            self.reporter.summarize(self.state, "failed", "non_finite", None, None, {})
        self.reporter.close()
        return False

    def start(self, messages: list[str]) -> list[str]:
        """Announce the run and what has to be said about it; returns the messages left to say, none."""
        self.reporter.start(self._run_info())
        for message in messages:
            self.reporter.message(message)
        self.meter.start(self.state.elapsed_s)
        return []

    def run(self, signals: StopSignal) -> tuple[str, str]:
        """Train until something says stop. Returns (status, reason)."""
        state = self.state
        while True:
            if signals.status:
                return signals.status, "signal"
            if reason := self.stops.after_round(state.samples_seen, self.num_samples, self.meter.elapsed_s):
                return "finished", reason
            self._run_round()
            if state.samples_seen >= (state.closed_epochs + 1) * self.num_samples:
                evaluation = self._close_epoch()
                if evaluation and (reason := self.stops.after_evaluation(evaluation.accuracy, evaluation.loss)):
                    return "target_reached", reason
                every = self.trainer.checkpoint_settings.every_epochs
                if every and state.closed_epochs % every == 0:
                    self._write_checkpoint()
            every_s = self.trainer.checkpoint_settings.every_s
            if every_s and self.meter.elapsed_s - self._last_checkpoint_s >= every_s:
                self._write_checkpoint()

    def _run_round(self) -> None:
        state, schedule = self.state, self.trainer.schedule
        start = state.samples_seen
        if self._restarts and schedule.drops_between(state.last_round_start, start, self.num_samples):
            self._restart()
        plan = self.parts.plan(
            state.round_index, start, schedule.factor(start, self.num_samples, self.total_samples)
        )
        self._absorb(self.executor.submit(plan))
        state.round_index, state.last_round_start = state.round_index + 1, start
        state.samples_seen += self.trainer.samples_per_round
        self.learning_rate = plan.learning_rates[0]
        self.meter.update(self.settings.batch_size * self.settings.num_learners)
        self.reporter.progress(state, self.learning_rate, self.settings.num_learners)

    def _restart(self) -> None:
        self._drain()
        self.parts.bank.restart(self.parts.rule.restart_momentum)
        self.reporter.message("The learning rate dropped: learners restart from the average model.")

    def _drain(self) -> None:
        """Wait for what is in flight; the bank may be read and changed afterwards."""
        self._absorb(self.executor.drain())

    def _absorb(self, outcomes: Sequence[RoundOutcome]) -> None:
        """Count losses; stop for, or reseed, learners that were gated."""
        for outcome in outcomes:
            self.state.absorb(outcome)
            sick = outcome.non_finite_learners
            # With every learner gone there is nothing healthy to clone, so reseeding would loop for ever.
            if sick and (self.settings.on_nonfinite == "stop" or len(sick) == self.settings.num_learners):
                raise NonFiniteError(sick[0], outcome.plan.index, self._newest_checkpoint())
        sick_learners = {learner for outcome in outcomes for learner in outcome.non_finite_learners}
        if sick_learners:
            self._reseed(sick_learners, outcomes[-1].plan.index)

    def _reseed(self, sick: set[int], round_index: int) -> None:
        late = self.executor.drain()
        for outcome in late:
            self.state.absorb(outcome)
            sick |= set(outcome.non_finite_learners)
        healthy = [learner for learner in range(self.settings.num_learners) if learner not in sick]
        if not healthy:
            raise NonFiniteError(min(sick), round_index, self._newest_checkpoint())
        for learner in sorted(sick):
            self.parts.bank.reseed(learner, healthy)
            self.state.num_reseeded += 1
            self.reporter.message(f"Learner {learner} went non-finite in round {round_index}: reseeded from z.")

    def _close_epoch(self) -> Evaluation | None:
        """Wait, evaluate, record, and start the next epoch. Returns what stops and the best accuracy look at."""
        self._drain()
        self.meter.pause()
        feed = self.parts.validation_feed or self.parts.test_feed
        evaluation, each = evaluate_parts(self.parts, feed, self.state.samples_seen) if feed else (None, [])
        self.state.elapsed_s = self.meter.elapsed_s
        if evaluation:
            self.state.note_accuracy(evaluation.accuracy, self.stops.target_accuracy, self.meter.elapsed_s)
        if self.parts.validation_feed is None:
            self.final = evaluation
        self.reporter.epoch(self._record(evaluation, each))
        self.state.last_recorded = self.state.samples_seen
        self.state.close_epoch(self.num_samples)
        self.meter.resume()
        return evaluation

    def _record(self, evaluation: Evaluation | None, each: Sequence[Evaluation]) -> EpochRecord:
        state, validates = self.state, self.parts.validation_feed is not None
        loss, accuracy = (evaluation.loss, evaluation.accuracy) if evaluation else (None, None)
        central = self.parts.rule.has_central_model
        epochs = state.samples_seen / self.num_samples
        rate = self.meter.lap()
        return EpochRecord(
            epoch=int(epochs) if epochs >= state.closed_epochs + 1 else round(epochs, 4),
            samples_seen=state.samples_seen,
            train_loss=state.train_loss,
            train_accuracy=state.train_accuracy(self.settings.batch_size),
            test_loss=None if validates else loss,
            test_accuracy=None if validates else accuracy,
            validation_loss=loss if validates else None,
            validation_accuracy=accuracy if validates else None,
            images_per_s=rate,
            images_per_s_per_device=rate / self.parts.collective.num_devices,
            num_learners=self.settings.num_learners,
            learning_rate=self.learning_rate,
            elapsed_s=state.elapsed_s,
            spread=replica_spread(self.parts.bank) if central else None,
            correction_norm=correction_norm(self.parts.bank) if central else None,
            learner_test_accuracy=tuple(one.accuracy or 0.0 for one in each) if each and not validates else None,
            metrics=evaluation.metrics if evaluation else {},
        )

    def _write_checkpoint(self) -> None:
        """Wait for what is in flight and write. A disk that refuses is reported, and training goes on."""
        if self.trainer.output_dir is None:
            return
        self._drain()
        self.meter.pause()
        state = self.state
        state.elapsed_s = self._last_checkpoint_s = self.meter.elapsed_s
        try:
            path = checkpoint.save(
                self.trainer.output_dir,
                self.trainer.state_dict(),
                state.samples_seen,
                self.trainer.checkpoint_settings.keep,
            )
            self._last_checkpoint_samples = state.samples_seen
            self.reporter.checkpoint(str(path), state.samples_seen)
        except OSError as error:
            self.reporter.message(f"No checkpoint was written ({error}); training goes on, make room soon.")
        self.meter.resume()

    def _newest_checkpoint(self) -> str | None:
        found = checkpoint.checkpoints(self.trainer.output_dir) if self.trainer.output_dir else []
        return str(found[0]) if found else None

    def finish(self, status: str, reason: str) -> Result:
        """Evaluate what is not yet evaluated, write the last checkpoint and the model, and sum up."""
        self._drain()
        stopped_by_signal = reason == "signal"
        if self.state.last_recorded != self.state.samples_seen:
            self.final = None  # of an earlier model
            if not stopped_by_signal:
                self._close_partial_epoch()
        if self._last_checkpoint_samples != self.state.samples_seen:
            self._write_checkpoint()
        self.meter.pause()
        if self.parts.test_feed and self.final is None and not stopped_by_signal:
            self.final = evaluate_parts(self.parts, self.parts.test_feed, self.state.samples_seen)[0]
        models = [self.parts.evaluator.module(state) for state in final_states(self.parts, self.state.samples_seen)]
        model_path = self._save_models(models)
        extra: dict[str, Any] = {"metrics": self.final.metrics} if self.final and self.final.metrics else {}
        summary = self.reporter.summarize(self.state, status, reason, self.final, model_path, extra)
        independent = models if not self.parts.rule.has_central_model else []
        accuracy = self.final.accuracy if self.final else None
        return Result(status, reason, accuracy, summary.images_per_s, models[0], independent, summary)

    def _close_partial_epoch(self) -> None:
        """Record where a run stopped inside an epoch; the epoch's sums are kept, for a resume with a later stop."""
        kept = self.state.to_plain()
        self._close_epoch()
        for name in ("closed_epochs", "loss_sum", "num_losses", "num_correct"):
            setattr(self.state, name, kept[name])

    def _save_models(self, models: Sequence[nn.Module]) -> str | None:
        folder = self.trainer.output_dir
        if folder is None:
            return None
        single = self.parts.rule.has_central_model
        paths = [folder / ("model.safetensors" if single else f"model_{j}.safetensors") for j in range(len(models))]
        for module, path in zip(models, paths, strict=True):
            _save_weights(module, path)
        return str(paths[0]) if single else str(folder)

    def _run_info(self) -> RunInfo:
        trainer, parts = self.trainer, self.parts
        return RunInfo(
            experiment=trainer.experiment,
            model=trainer.names["model"],
            num_parameters=parts.bank.layout.num_values,
            data=trainer.names["data"],
            num_train_samples=self.num_samples,
            num_test_samples=parts.test_feed.num_samples if parts.test_feed else 0,
            device=str(parts.choices.device),
            executor=parts.choices.executor,
            precision=parts.choices.precision.name,
            averaging=parts.rule.NAME,
            num_learners=self.settings.num_learners,
            num_devices=parts.collective.num_devices,
            batch_size=self.settings.batch_size,
            seed=self.settings.seed,
            samples_seen=self.state.samples_seen,
            planned_samples=self.total_samples,
            output_dir=str(trainer.output_dir) if trainer.output_dir else None,
            resumed_from=trainer.resumed_from,
        )


def final_states(parts: Parts, cursor: int) -> list[Any]:
    """State dicts of what a run produces: the average model, or every independent learner.

    `cursor` is where recalibration takes its training batches from in the sample stream.
    """
    bank, rule = parts.bank, parts.rule
    if not rule.has_central_model:
        return [bank.learner_state(learner) for learner in range(bank.num_learners)]
    state = bank.central_state()
    if rule.batch_norm == "recalibrate" and bank.num_learners > 1:
        size = parts.train_feed.batch_size
        starts = (cursor + i * size for i in range(rule.recalibration_batches))
        state = parts.evaluator.recalibrate(state, (parts.train_feed.batch(start).inputs for start in starts))
    return [state]


def evaluate_parts(parts: Parts, feed: Feed, cursor: int) -> tuple[Evaluation, list[Evaluation]]:
    """The evaluation stops look at, and each learner's when they are independent (then the first is their mean)."""
    each = [parts.evaluator.evaluate(state, feed) for state in final_states(parts, cursor)]
    return (each[0], []) if parts.rule.has_central_model else (mean_evaluation(each), each)


def _check_targets(parts: Parts, stops: StopConditions) -> None:
    measured = parts.validation_feed or parts.test_feed
    for name in ("target_accuracy", "target_loss"):
        if getattr(stops, name) is not None and measured is None:
            raise UserError(f"{name} is measured on data, got neither test_data nor validation_data; give one of them.")


def _save_weights(module: nn.Module, path: Path) -> None:
    try:
        checkpoint.save_weights(module, path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error}); make room there and resume the run.") from error
