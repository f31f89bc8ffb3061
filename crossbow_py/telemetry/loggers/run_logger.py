"""The listener that records a run in a tracking service, by the tags and over the samples that TensorBoard has."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.telemetry.console import CONSOLE_LOG
from crossbow_py.telemetry.events import (
    EpochRecord,
    LearnerCount,
    NotingListener,
    Predictions,
    Progress,
    RunInfo,
    Summary,
)
from crossbow_py.telemetry.loggers.tracker import END, Courier, Plain, Subject, Tracker
from crossbow_py.telemetry.records import CONFIG_FILE, CONFUSION_FILES, METRICS_FILE, SUMMARY_FILE
from crossbow_py.telemetry.scalars import (
    evaluation_scalars,
    final_figures,
    finite_values,
    learner_scalars,
    next_point_s,
    training_scalars,
)

_INTERVAL_S = 1.0  # the least seconds of training between two points within an epoch
_FILES = (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, *CONFUSION_FILES.values(), CONSOLE_LOG)


class RunLogger(NotingListener):
    """Records a run: parameters, curves, pictures, in the end the figures and files of its folder.

    Args:
        tracker: the service.
        log_model: whether it gets the model, too.
    """

    ONLY_FIRST_RANK: ClassVar[bool] = True

    def __init__(self, tracker: Tracker, log_model: bool = False) -> None:
        self._tracker, self._log_model = tracker, log_model
        self._courier: Courier | None = None
        self._num_devices = 1
        self._next_point_s = 0.0
        self._samples_seen = 0

    def on_start(self, info: RunInfo) -> None:
        """Begin the run, or go on with it. Raises UserError if the service cannot be reached."""
        self._num_devices, self._next_point_s, self._samples_seen = info.num_devices, 0.0, info.samples_seen
        subject = Subject(
            experiment=info.experiment,
            folder=None if info.output_dir is None else Path(info.output_dir),
            parameters=info.hyper_parameters,
            facts=_facts(info),
            continues=info.samples_seen > 0,
        )
        self._notes += tuple(self._tracker.open(subject))
        self._courier = Courier(self._tracker)

    def on_progress(self, progress: Progress) -> None:
        """Send points within an epoch, ever more rarely."""
        if progress.elapsed_s >= self._next_point_s:
            self._next_point_s = next_point_s(progress.elapsed_s, _INTERVAL_S)
            values = training_scalars(progress, self._num_devices)
            self._send(progress.samples_seen, {**values, "epoch": progress.epoch})

    def on_epoch(self, record: EpochRecord) -> None:
        values = training_scalars(record, self._num_devices) | evaluation_scalars(record)
        for index, own in enumerate(learner_scalars(record)):
            values |= {f"{tag}_learner_{index}": value for tag, value in own.items()}
        self._send(record.samples_seen, {**values, "epoch": record.epoch})

    def on_predictions(self, predictions: Predictions, samples_seen: int) -> None:
        if self._courier is not None:
            self._courier.do("predictions", self._show_predictions, predictions, samples_seen)

    def on_class_counts(self, counts: ClassCounts, which: str, samples_seen: int) -> None:
        if self._courier is not None:
            self._courier.do(f"confusion_matrix/{which}", self._show_counts, counts, which, samples_seen)

    def on_learner_count(self, change: LearnerCount) -> None:
        self._send(change.samples_seen, {"num_learners": change.num_learners})

    def on_end(self, summary: Summary) -> None:
        """Send the final figures and files, and wait for all to arrive, for at most a minute."""
        if self._courier is None:
            return
        if summary.output_dir is not None:
            folder = Path(summary.output_dir)
            for path in [path for name in _FILES if (path := folder / name).is_file()]:
                self._courier.do(path.name, self._tracker.file, path)
            for name in summary.model_sha256 if self._log_model else ():
                self._courier.do(name, self._tracker.model, folder / name)
        facts: dict[str, Plain] = {"status": summary.status, "stop_reason": summary.stop_reason}
        figures = finite_values(final_figures(summary))
        self._courier.do(END, self._tracker.end, summary.status, summary.samples_seen, figures, facts)
        self._notes += tuple(self._courier.finish())
        self._courier = None

    def take_notes(self) -> list[str]:
        return [*super().take_notes(), *([] if self._courier is None else self._courier.problems())]

    def close(self) -> None:
        """End a run that was not told how it ended as one that failed."""
        if self._courier is not None:
            self._courier.do(END, self._tracker.end, "failed", self._samples_seen, {}, {"status": "failed"})
            self._courier.close()
            self._courier = None

    # Pictures are drawn in the courier's thread, and only there is what draws them imported.

    def _show_predictions(self, predictions: Predictions, samples_seen: int) -> None:
        from crossbow_py.telemetry.pictures.prediction_grid import prediction_grid  # noqa: PLC0415

        self._tracker.picture("predictions", prediction_grid(predictions), samples_seen)

    def _show_counts(self, counts: ClassCounts, which: str, samples_seen: int) -> None:
        from crossbow_py.telemetry.pictures.confusion_picture import confusion_picture  # noqa: PLC0415

        self._tracker.picture(f"confusion_matrix/{which}", confusion_picture(counts), samples_seen)

    def _send(self, samples_seen: int, values: dict[str, float | None]) -> None:
        self._samples_seen = samples_seen
        if self._courier is not None:
            self._courier.add(samples_seen, finite_values(values))


def _facts(info: RunInfo) -> dict[str, Plain]:
    facts: dict[str, Plain | None] = {
        "experiment": info.experiment,
        "device": info.device,
        "num_parameters": info.num_parameters,
        "num_train_samples": info.num_train_samples,
        "num_test_samples": info.num_test_samples,
        "planned_samples": info.planned_samples,
        "output_dir": info.output_dir,
    }
    return {name: value for name, value in facts.items() if value is not None}
