"""The console output of a run: a header, live progress, a line per epoch, and a last block that lists the files.

On a terminal the progress is one line with a bar, which rich redraws in place; anywhere else it is a plain line every
ten seconds, without control codes. Everything except the live line also goes to console.log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crossbow_py.core.signals import StopSignal
from crossbow_py.telemetry.events import (
    EpochRecord,
    LearnerCount,
    LearningStatistics,
    Listener,
    Progress,
    RunInfo,
    Summary,
)
from crossbow_py.telemetry.records import TENSORBOARD_FOLDER
from crossbow_py.telemetry.screen import Screen

CONSOLE_LOG = "console.log"
PLAIN_INTERVAL_S = 10.0
_WIDTH_FOR_A_BAR = 110  # columns: the bar takes 21, the line beside it 88 or so
_NOTHING_PLANNED = "–"
_LONG_LOSS = 1e5  # from which on four decimals mean nothing
_WORTH_SAYING = 0.01  # the share of time spent waiting for data


class ConsoleListener(Listener):
    """Prints to the terminal and to console.log.

    If the terminal goes away (a closed pipe), training and the log go on.

    Args:
        log_path: console.log, appended to; None for none.
        stream: the stream to print to, by default the process's stdout.
        clock: monotonic seconds, for the spacing of plain progress lines.
    """

    def __init__(
        self, log_path: Path | None = None, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._screen = Screen(log_path, stream)
        self._clock = clock
        self._next_line_s = 0.0
        self._planned_samples: int | None = None
        self._planned_epochs = _NOTHING_PLANNED
        self._trace_path: str | None = None
        self._has_checkpoint = False

    def on_start(self, info: RunInfo) -> None:
        """Print the header, and the live line under it."""
        self._planned_samples, self._trace_path = info.planned_samples, info.trace_path
        self._has_checkpoint = info.resumed_from is not None
        if info.planned_samples is not None:
            self._planned_epochs = f"{info.planned_samples / info.num_train_samples:g}"
        for line in header_lines(info):
            self._screen.say(line)
        self._next_line_s = self._clock() + PLAIN_INTERVAL_S
        self._screen.start_live()

    def on_progress(self, progress: Progress) -> None:
        """Redraw the live line, or print a plain line every ten seconds without a terminal."""
        text = progress_line(progress, self._planned_epochs)
        if self._screen.is_live:
            self._screen.show(self._with_bar(text, progress.samples_seen))
        elif self._clock() >= self._next_line_s:
            self._next_line_s = self._clock() + PLAIN_INTERVAL_S
            self._screen.say(text)

    def on_epoch(self, record: EpochRecord) -> None:
        """Print the epoch's line."""
        self._screen.say(epoch_line(record, self._planned_epochs))
        if record.learning is not None:
            self._screen.say(learning_line(record.learning))

    def on_learner_count(self, change: LearnerCount) -> None:
        """Print a sentence."""
        self._screen.say(f"auto-tuner: {change.reason}")

    def on_message(self, message: str) -> None:
        """Print a sentence."""
        self._screen.say(message)

    def on_checkpoint(self, path: str, samples_seen: int) -> None:
        """Note that there is a checkpoint, for the last block."""
        self._has_checkpoint = True

    def on_end(self, summary: Summary) -> None:
        """Print the last block."""
        self._screen.stop_live()
        for line in final_lines(summary):
            self._screen.say(line)
        if self._has_checkpoint and summary.status in StopSignal.REASONS:
            self._screen.say("  to go on       the same command with resume=auto")
        if self._trace_path is not None and Path(self._trace_path).exists():
            self._screen.say(f"  timeline       {self._trace_path} (open it in ui.perfetto.dev)")

    def close(self) -> None:
        """Restore the terminal (cursor shown, live line gone) and close the log."""
        self._screen.close()

    def _with_bar(self, line: str, samples_seen: int) -> Table | Text:
        text = Text(line, no_wrap=True, overflow="ellipsis")
        if not self._planned_samples or self._screen.width < _WIDTH_FOR_A_BAR:
            return text
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=self._planned_samples, completed=samples_seen, width=20), text)
        return row


def header_lines(info: RunInfo) -> list[str]:
    """Return the lines that describe the run."""
    settings = f" ({', '.join(info.averaging_settings)})" if info.averaging_settings else ""
    ema = "" if info.average_ema is None else f" (evaluated: EMA over {_count(info.average_ema, 'epoch')})"
    lines = [
        f"{info.experiment}: {info.model} ({info.num_parameters:,} parameters) on {info.data} "
        f"({info.num_train_samples:,} training and {info.num_test_samples:,} test samples)",
        f"{_count(info.num_learners, 'learner')} of batch size {info.batch_size} on "
        f"{'each of ' if info.num_devices > 1 else ''}{_count(info.num_devices, 'device')} ({info.device}) · "
        f"averaging {info.averaging}{settings}{ema} · executor {info.executor} · {info.precision} · seed {info.seed}",
    ]
    if info.output_dir:
        lines.append(f"writing to {info.output_dir}")
    if info.resumed_from:
        lines.append(f"resuming from {info.resumed_from} at {info.samples_seen:,} samples")
    return lines


def progress_line(progress: Progress, planned_epochs: str) -> str:
    """Return the progress of training on one line."""
    parts = [
        f"epoch {progress.epoch:.2f}/{planned_epochs}",
        f"loss {_loss(progress.train_loss)}",
        f"{progress.images_per_s:,.0f} images/s",
        *_waiting(progress.data_wait_share),
    ]
    if progress.remaining_s is not None:
        parts.append(f"{clock_time(progress.remaining_s)} left")
    # What a narrow terminal may cut off comes last.
    parts += [
        f"lr {progress.learning_rate:.4g}",
        _count(progress.num_learners, "learner"),
        f"{progress.samples_seen:,} samples",
    ]
    return " · ".join(parts)


def epoch_line(record: EpochRecord, planned_epochs: str) -> str:
    """Return the line of a closed epoch."""
    parts = [f"epoch {record.epoch}/{planned_epochs}", f"train loss {_loss(record.train_loss)}"]
    measured = [
        ("validation", record.validation_accuracy, record.validation_loss),
        ("test", record.test_accuracy, record.test_loss),
    ]
    for data, accuracy, loss in measured:
        if accuracy is not None:
            parts.append(f"{data} accuracy {accuracy:.4f}")
        elif loss is not None:
            parts.append(f"{data} loss {_loss(loss)}")
    parts += [f"{name} {value:.4g}" for name, value in record.metrics.items()]
    known = [accuracy for accuracy in record.learner_accuracy or () if accuracy is not None]
    if known:
        parts.append("learners " + " ".join(f"{accuracy:.4f}" for accuracy in known))
    parts += [f"{record.images_per_s:,.0f} images/s", *_waiting(record.data_wait_share)]
    parts += [f"lr {record.learning_rate:.4g}", clock_time(record.elapsed_s)]
    return " · ".join(parts)


def learning_line(learning: LearningStatistics) -> str:
    """Return the line of the learning statistics of an epoch, and how long they took."""
    found = [
        ("gradient noise scale {:,.0f} samples", learning.gradient_noise_scale_samples),
        ("agreement of learners {:.4f}", learning.agreement),
        ("sharpness {:.4g}", learning.sharpness),
        ("measured in {:.1f} s", learning.measuring_s),
    ]
    return "  learning: " + " · ".join(form.format(value) for form, value in found if value is not None)


def final_lines(summary: Summary) -> list[str]:
    """Return the lines on how the run ended and where its files are."""
    lines = ["", f"{summary.experiment} {summary.status.replace('_', ' ')}: {summary.stop_reason}"]
    if summary.test_accuracy is not None:
        best = f" (best {summary.best_test_accuracy:.4f})" if summary.best_test_accuracy is not None else ""
        lines.append(f"  test accuracy  {summary.test_accuracy:.4f}{best}")
    elif summary.test_loss is not None:
        lines.append(f"  test loss      {summary.test_loss:.4f}")
    lines += [f"  {name:<14} {value:.4g}" for name, value in summary.metrics.items()]
    known = [accuracy for accuracy in summary.learner_test_accuracy or () if accuracy is not None]
    if known:
        lines.append(f"                 the mean of the learners' {' '.join(f'{accuracy:.4f}' for accuracy in known)}")
    if summary.best_validation_accuracy is not None:
        lines.append(f"  validation     {summary.best_validation_accuracy:.4f} at best")
    if summary.time_to_accuracy_s is not None:
        lines.append(f"  to the target  {summary.time_to_accuracy_s:.1f} s of training")
    lines.append(f"  time           {summary.train_time_s:.1f} s training, {summary.wall_time_s:.1f} s in all")
    lines.append(f"  throughput     {summary.images_per_s:,.0f} images/s")
    if summary.data_wait_share is not None:
        workers = _count(summary.num_workers or 0, "worker")
        lines.append(f"  data           {workers}, {summary.data_wait_share:.1%} of training spent waiting for them")
    if summary.model_path:
        lines.append(f"  model          {summary.model_path}")
    if summary.output_dir:
        lines.append(f"  run folder     {summary.output_dir}")
        lines.append(f"  curves         tensorboard --logdir {Path(summary.output_dir) / TENSORBOARD_FOLDER}")
    return lines


def _waiting(share: float | None) -> list[str]:
    """Return the share of time spent waiting for data, empty if it is small."""
    return [f"{share:.0%} waiting for data"] if share is not None and share >= _WORTH_SAYING else []


def clock_time(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(number: float, thing: str) -> str:
    return f"{number:g} {thing}" if number == 1 else f"{number:g} {thing}s"


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < _LONG_LOSS else f"{value:.4g}"
