"""The end of an epoch, once nothing is in flight: evaluate, record, and begin the next one."""

from __future__ import annotations

from crossbow_py.telemetry.events import LearningStatistics
from crossbow_py.telemetry.throughput import ThroughputMeter
from crossbow_py.train.evaluation.evaluator import non_finite_remark
from crossbow_py.train.evaluation.learning_measurement import LearningMeasurement
from crossbow_py.train.run import Measured, Run
from crossbow_py.train.run_folder.reporter import Reporter, epoch_record
from crossbow_py.train.run_settings import StopConditions


class EpochCloser:
    """Closes epochs. Owned by the training loop, which drains before each call. All ranks together.

    Args:
        run: the run.
        reporter: gets the records.
        meter: measures training time, and is paused meanwhile.
        stops: has the target accuracy.
    """

    def __init__(self, run: Run, reporter: Reporter, meter: ThroughputMeter, stops: StopConditions) -> None:
        self._run, self._state, self._stops = run, run.state, stops
        self._reporter, self._meter, self._watch = reporter, meter, run.ranks.watch
        self._measured = "validation" if run.validation_feed else "test"
        self._learning = LearningMeasurement(run) if run.settings.learning_statistics else None
        self._final: Measured | None = None

    def close(self, learning_rate: float) -> None:
        """Evaluate, record with the learning rate of the last round, and start the next epoch."""
        run, state = self._run, self._state
        run.check_z()
        self._meter.pause()
        self._watch.doing = f"the evaluation after round {state.round_index - 1}"
        measured = self._evaluate(self._measured)
        state.elapsed_s = self._meter.elapsed_s
        if measured:
            state.note_evaluation(measured[0].accuracy, measured[0].loss, self._stops.target_accuracy)
        self._final = measured if self._measured == "test" else None
        learning = self._measure_learning()
        run.add_up_epoch()
        lap = self._meter.lap()
        self._reporter.epoch(epoch_record(run, lap, learning_rate, measured, self._measured, learning))
        self._reporter.predictions(run, measured)
        state.last_recorded = state.samples_seen
        state.close_epoch(run.num_samples)
        self._meter.resume()

    def _measure_learning(self) -> LearningStatistics | None:
        """Measure the statistics of learning, if asked for. The meter is paused."""
        if self._learning is None:
            return None
        self._watch.doing = f"the statistics of learning after round {self._state.round_index - 1}"
        measured = self._learning.measure(self._measured)
        for note in self._learning.take_notes():
            self._reporter.message(note)
        return measured

    def close_partial(self, learning_rate: float) -> None:
        """Record a run that stops inside an epoch; the epoch's sums are kept, for a resume with a later stop."""
        kept = self._state.open_epoch
        self.close(learning_rate)
        self._state.reopen_epoch(kept)

    def final(self, measures: bool) -> Measured | None:
        """Return the evaluation of the final model on test data: the last epoch's, or a new one if `measures`."""
        if self._state.last_recorded != self._state.samples_seen:
            self._final = None  # of an earlier model
        if self._final is None and measures:
            self._final = self._evaluate("test")
        return self._final

    def _evaluate(self, which: str) -> Measured | None:
        """Evaluate on the `test` or `validation` data, and report outputs that are not finite."""
        measured = self._run.evaluate(which)
        if measured and measured[0].num_non_finite:
            what = f"{which} data after {self._state.samples_seen:,} samples"
            self._reporter.message(non_finite_remark(what, measured[0].num_non_finite, measured[0].num_samples))
        return measured
