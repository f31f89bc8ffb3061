"""The end of an epoch, or of a part of it: the current models are evaluated, and the epoch is recorded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.evaluation.current_models import evaluate, final_states, model_samples
from crossbow_py.train.evaluation.evaluator import Measured, State, non_finite_remark
from crossbow_py.train.evaluation.learning_measurement import LearningMeasurement
from crossbow_py.train.loop.average_model import check_z
from crossbow_py.train.run import Run
from crossbow_py.train.run_folder.reporter import Reporter, epoch_record
from crossbow_py.train.run_settings import StopConditions
from crossbow_py.train.train_state import is_better


class EpochEnd:
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
        if state.best is None and state.last_recorded == state.samples_seen:
            state.keep_if_best(state.last_accuracy, state.last_loss, final_states(run))
        best_loss = math.nan if state.best_loss is None else state.best_loss
        if state.best and not is_better(state.best_accuracy, best_loss, state.best.accuracy, state.best.loss):
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
        check_z(run)
        self._meter.pause()
        self._watch.doing = f"the evaluation after round {state.round_index - 1}"
        states = final_states(run) if run.feed_of(self._measured) else []
        measured = self._evaluate(self._measured, states)
        state.elapsed_s = self._meter.elapsed_s
        if measured:
            accuracy, loss = measured[0].accuracy, measured[0].loss
            state.note_evaluation(accuracy, loss, self._stops.target_accuracy, is_stop)
            if self._stops.returns_best:
                state.keep_if_best(accuracy, loss, states)
        self._final = measured if self._measured == "test" else None
        unsmoothed = None
        if run.average_ema is not None and measured:
            unsmoothed = evaluate(run, self._measured, final_states(run, ema=False))
        learning = None
        if self._learning is not None:
            self._watch.doing = f"the statistics of learning after round {state.round_index - 1}"
            learning = self._learning.measure(self._measured)
            for note in self._learning.take_notes():
                self._reporter.message(note)
        own = state.loss_sum, state.num_losses, state.num_correct
        state.loss_sum, state.num_losses, state.num_correct = state.epoch_sums(run.ranks)
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
        if not self._state.last_recorded == self._state.samples_seen == model_samples(self._run):
            self._final = None  # of another model
        if self._final is None and measures:
            self._final = self._evaluate("test")
        return self._final

    def _evaluate(self, which: str, states: Sequence[State] | None = None) -> Measured | None:
        """Evaluate on the `test` or `validation` data, and report outputs that are not finite."""
        self.is_evaluating = True
        measured = evaluate(self._run, which, states)
        self.is_evaluating = False
        if measured and measured[0].num_non_finite:
            what = f"{which} data after {self._state.samples_seen:,} samples"
            self._reporter.message(non_finite_remark(what, measured[0].num_non_finite, measured[0].num_samples))
        return measured
