"""A run in TensorBoard. The x-axis is samples seen, so that runs with different learner counts can be compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from crossbow_py.telemetry.class_counts import ClassCounts, markdown_table
from crossbow_py.telemetry.confusion_picture import confusion_picture
from crossbow_py.telemetry.dashboard import dashboard
from crossbow_py.telemetry.events import EpochRecord, LearnerCount, Listener, Predictions, Progress, RunInfo, Summary
from crossbow_py.telemetry.hyper_parameters import columns_of_runs, ended, started
from crossbow_py.telemetry.prediction_grid import prediction_grid
from crossbow_py.telemetry.scalars import evaluation_scalars, finite_values, next_point_s, training_scalars
from crossbow_py.telemetry.system import SystemMonitor

_MACHINE_INTERVAL_S = 5.0  # of training, between two samples of the machine


class TensorBoardScalars(Listener):
    """Writes one run's event file: curves, samples of the machine, pictures of predictions, hyper-parameters.

    Args:
        folder: TensorBoard's folder.
        resumed_samples: points of an earlier process beyond that many samples are hidden; None hides them all.
        config_text: the run's configuration, shown as text.
        interval_s: the least seconds of training between two points within an epoch.
        new_monitor: makes the machine's monitor when the run starts.
    """

    def __init__(
        self,
        folder: Path,
        resumed_samples: int | None,
        config_text: str | None = None,
        interval_s: float = 0.5,
        new_monitor: Callable[[], SystemMonitor] = SystemMonitor,
    ) -> None:
        self._folder, self._config_text, self._interval_s = folder, config_text, interval_s
        self._new_monitor = new_monitor
        self._purge_step = 0 if resumed_samples is None else resumed_samples + 1
        self._writer: SummaryWriter | None = None
        self._monitor: SystemMonitor | None = None
        self._num_devices = 1
        self._next_point_s = self._next_sample_s = 0.0
        self._warned = False
        self._last_samples = -1

    def on_start(self, info: RunInfo) -> None:
        self._num_devices = info.num_devices
        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        self._monitor, self._next_sample_s, self._warned = self._new_monitor(), 0.0, False
        self._writer.add_custom_scalars(dashboard(info))
        self._compare(columns_of_runs())
        self._compare(started(info.hyper_parameters, str(self._folder), time.time()))
        if self._config_text is not None:
            indented = "\n".join("    " + line for line in self._config_text.splitlines())
            self._writer.add_text("config", indented, info.samples_seen)
        self._writer.flush()

    def on_progress(self, progress: Progress) -> None:
        """Write points within an epoch, ever more rarely."""
        now_s = progress.elapsed_s
        if self._monitor is not None and self._writer is not None and now_s >= self._next_sample_s:
            self._next_sample_s = now_s + _MACHINE_INTERVAL_S
            for tag, value in self._monitor.sample().items():
                self._writer.add_scalar(tag, value, progress.samples_seen)
        if now_s >= self._next_point_s:
            self._next_point_s = next_point_s(now_s, self._interval_s)
            self._write(progress.samples_seen, training_scalars(progress, self._num_devices))

    def on_epoch(self, record: EpochRecord) -> None:
        """Write the figures of a closed epoch; without a central model also each learner's own accuracy."""
        evaluated = evaluation_scalars(record)
        if record.samples_seen != self._last_samples:
            evaluated |= training_scalars(record, self._num_devices)
        self._write(record.samples_seen, evaluated)
        if self._writer is not None:
            self._writer.flush()

    def on_predictions(self, predictions: Predictions, samples_seen: int) -> None:
        if self._writer is not None:
            self._writer.add_image("predictions", prediction_grid(predictions), samples_seen, dataformats="HWC")

    def on_class_counts(self, counts: ClassCounts, which: str, samples_seen: int) -> None:
        if self._writer is not None:
            picture, table = confusion_picture(counts), markdown_table(counts.figures())
            self._writer.add_image(f"confusion_matrix/{which}", picture, samples_seen, dataformats="HWC")
            self._writer.add_text(f"classes/{which}", table, samples_seen)

    def on_learner_count(self, change: LearnerCount) -> None:
        if self._writer is not None:
            self._writer.add_text("auto_tuner", change.reason, change.samples_seen)
            self._writer.add_scalar("num_learners", change.num_learners, change.samples_seen)

    def on_end(self, summary: Summary) -> None:
        self._compare(ended(failed=summary.status == "failed", now_s=time.time()))
        if self._writer is not None:
            if summary.time_to_accuracy_s is not None:
                self._writer.add_scalar("time/to_accuracy_s", summary.time_to_accuracy_s, summary.samples_seen)
            text = f"{summary.status}: {summary.stop_reason}; test accuracy {summary.test_accuracy}"
            self._writer.add_text("result", text, summary.samples_seen)

    def take_notes(self) -> list[str]:
        if self._warned or self._monitor is None or self._monitor.warning is None:
            return []
        self._warned = True
        return [self._monitor.warning]

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._writer is not None:
            with suppress(OSError):  # raised again for its thread, which a full disk has ended
                self._writer.close()
            self._writer = None

    def _compare(self, summary: Any) -> None:
        if self._writer is not None:
            self._writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]

    def _write(self, samples_seen: int, values: dict[str, float | None]) -> None:
        self._last_samples = samples_seen
        for tag, value in finite_values(values).items():
            if self._writer is not None:
                self._writer.add_scalar(tag, value, samples_seen)
