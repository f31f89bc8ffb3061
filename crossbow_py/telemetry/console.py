"""The console output of a run: a header, live progress, a line per epoch, and a last block that lists the files.

On a terminal the progress is one line with a bar, which rich redraws in place; anywhere else it is a plain line every
ten seconds, without control codes. Everything except the live line also goes to console.log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import ClassVar, TextIO

from crossbow_py.core.printing import columns
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
from crossbow_py.telemetry.figures import few_values
from crossbow_py.telemetry.learners import MOST_LEARNERS, LearnerFigures, learner_rows
from crossbow_py.telemetry.rank_pace import WORTH_SAYING, RankSpread, spread_of, spread_text
from crossbow_py.telemetry.records import SUMMARY_FILE, TENSORBOARD_FOLDER
from crossbow_py.telemetry.screen import Screen, ScreenConsole, clock_time, counted, fact

CONSOLE_LOG = "console.log"
PLAIN_INTERVAL_S = 10.0
_NOTHING_PLANNED = "–"
_LONG_LOSS = 1e5  # from which on four decimals mean nothing
_WAIT_WORTH_SAYING = 0.01  # the share of time spent waiting for data


class ConsoleListener(ScreenConsole, Listener):
    """Prints to the terminal and to console.log.

    If the terminal goes away (a closed pipe), training and the log go on.

    Args:
        log_path: console.log, appended to; None for none.
        stream: the stream to print to, by default the process's stdout.
        clock: monotonic seconds, for the spacing of plain progress lines.
    """

    WIDTH_FOR_A_BAR: ClassVar[int] = 110

    def __init__(
        self, log_path: Path | None = None, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(Screen(log_path, stream), clock)
        self._next_line_s = 0.0
        self._planned_samples: int | None = None
        self._planned_epochs = _NOTHING_PLANNED
        self._trace_path: str | None = None
        self._has_checkpoint = False

    def on_start(self, info: RunInfo) -> None:
        self._planned_samples, self._trace_path = info.planned_samples, info.trace_path
        self._has_checkpoint = info.resumed_from is not None
        if info.planned_samples is not None:
            self._planned_epochs = f"{info.planned_samples / info.num_train_samples:.4g}"
        self._begin(header_lines(info))
        self._next_line_s = self._clock() + PLAIN_INTERVAL_S

    def on_progress(self, progress: Progress) -> None:
        text = progress_line(progress, self._planned_epochs)
        if self._screen.is_live:
            self._screen.show(self._with_bar(text, progress.samples_seen, self._planned_samples))
        elif self._clock() >= self._next_line_s:
            self._next_line_s = self._clock() + PLAIN_INTERVAL_S
            self._say(text)

    def on_epoch(self, record: EpochRecord) -> None:
        self._say(epoch_line(record, self._planned_epochs))
        if record.learning is not None:
            self._say(learning_line(record.learning))

    def on_learner_count(self, change: LearnerCount) -> None:
        self._say(f"{change.source}: {change.reason}")

    def on_checkpoint(self, path: str, samples_seen: int) -> None:
        self._has_checkpoint = True

    def on_end(self, summary: Summary) -> None:
        lines = final_lines(summary)
        if self._has_checkpoint and summary.status in StopSignal.REASONS:
            lines.append(fact("to go on", "the same command with resume=auto"))
        if self._trace_path is not None and Path(self._trace_path).exists():
            lines.append(fact("timeline", f"{self._trace_path} (open it in ui.perfetto.dev)"))
        self._end(lines)


def header_lines(info: RunInfo) -> list[str]:
    """Return the lines that describe the run."""
    settings = f" ({', '.join(info.averaging_settings)})" if info.averaging_settings else ""
    ema = "" if info.average_ema is None else f" (evaluated: EMA over {counted(info.average_ema, 'epoch')})"
    times = f" × {info.accumulate} accumulated" if info.accumulate > 1 else ""
    lines = [
        f"{info.experiment}: {info.model} ({info.num_parameters:,} parameters) on {info.data} "
        f"({info.num_train_samples:,} training and {info.num_test_samples:,} test samples)",
        f"{counted(info.num_learners, 'learner')} of batch size {info.batch_size}{times} on "
        f"{'each of ' if info.num_devices > 1 else ''}{counted(info.num_devices, 'device')} ({info.device}) · "
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
        _throughput(progress),
        *_waiting(progress.data_wait_share),
        *_slowest(spread_of(progress.ranks)),
    ]
    if progress.remaining_s is not None:
        parts.append(f"{clock_time(progress.remaining_s)} left")
    # What a narrow terminal may cut off comes last.
    parts += [
        f"lr {progress.learning_rate:.4g}",
        counted(progress.num_learners, "learner") + _efficiency(progress),
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
    parts += [f"{name} {value:.4g}" for name, value in few_values(record.metrics).items()]
    known = [accuracy for accuracy in record.learner_accuracy or () if accuracy is not None] or record.learner_loss
    if known:
        parts.append("learners " + " ".join(map(_loss, known)))
    parts += [_throughput(record), *_waiting(record.data_wait_share), *_slowest(record.ranks)]
    if record.efficiency is not None:
        parts.append(counted(record.num_learners, "learner") + _efficiency(record))
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


def _tested(summary: Summary) -> list[str]:
    best = summary.best_test_accuracy
    if summary.test_accuracy is not None:
        shown = "" if best is None else f" (best {best:.4f})"
        return [fact("test accuracy", f"{summary.test_accuracy:.4f}{shown}")]
    if best is not None:
        return [fact("test accuracy", f"{best:.4f} at best; the last model was not measured")]
    return [] if summary.test_loss is None else [fact("test loss", f"{summary.test_loss:.4f}")]


def final_lines(summary: Summary) -> list[str]:
    """Return the lines on how the run ended and where its files are."""
    lines = ["", f"{summary.experiment} {summary.status.replace('_', ' ')}: {summary.stop_reason}"]
    lines += _tested(summary)
    lines += [fact(name, f"{value:.4g}") for name, value in few_values(summary.metrics).items()]
    lines += _learners(summary.learners or ())
    if summary.best_validation_accuracy is not None:
        lines.append(fact("validation", f"{summary.best_validation_accuracy:.4f} at best"))
    if summary.time_to_accuracy_s is not None:
        lines.append(fact("to the target", f"{summary.time_to_accuracy_s:.1f} s of training"))
    lines.append(fact("time", f"{summary.train_time_s:.1f} s training, {summary.wall_time_s:.1f} s in all"))
    lines.append(fact("throughput", _throughput(summary)))
    lines += _ranks(summary)
    if summary.data_wait_share is not None:
        workers = counted(summary.num_workers or 0, "worker")
        lines.append(fact("data", f"{workers}, {summary.data_wait_share:.1%} of training spent waiting for them"))
    if summary.model_epoch is not None and summary.model_epoch < summary.epochs:
        lines.append(fact("best model", f"of epoch {summary.model_epoch:g}"))
    if summary.model_path:
        lines.append(fact("model", summary.model_path))
    if summary.output_dir:
        lines += folder_lines("run folder", summary.output_dir, is_run=True)
    return lines


def folder_lines(name: str, output_dir: str, *, is_run: bool = False) -> list[str]:
    """Return the lines that say where the files are, and how to look at the curves, if there are any."""
    curves = Path(output_dir) / TENSORBOARD_FOLDER
    lines, named = [fact(name, output_dir)], f"{Path(output_dir).resolve().name}:{curves}"
    if not curves.is_dir():
        return lines
    # TensorBoard calls a run in the folder that it is given "."; commas and more colons would mean other runs.
    is_named = is_run and named.count(":") == 1 and "," not in named
    served = f"--logdir_spec {quote(named)}" if is_named else f"--logdir {quote(str(curves))}"
    return [*lines, fact("curves", f"tensorboard {served}")]


def _learners(learners: Sequence[LearnerFigures]) -> list[str]:
    """Return the table of independent learners, whose best has a `*`; of many the first ones and the best."""
    heads, rows = learner_rows(learners)
    shown = rows[:MOST_LEARNERS] + [row for row in rows[MOST_LEARNERS:] if row[0].startswith("*")]
    lines = [fact("learners" if n == 0 else "", text.strip("\n")) for n, text in enumerate(columns(heads, shown))]
    left_out = len(rows) - len(shown)
    if left_out:
        lines.append(fact("", f"  {SUMMARY_FILE} has {left_out} more"))
    return [fact("", "the mean of the learners, of which * is the best"), *lines] if rows else []


def _throughput(found: Progress | EpochRecord | Summary) -> str:
    if found.tokens_per_s is not None:
        return f"{found.tokens_per_s:,.0f} tokens/s"
    return f"{found.images_per_s:,.0f} images/s"


def _efficiency(found: Progress | EpochRecord) -> str:
    """Return the efficiency of a sample and the gradient noise scale in brackets, if they are known."""
    if found.efficiency is None:
        return ""
    scale = "" if found.noise_scale_samples is None else f", noise scale {found.noise_scale_samples:,.0f}"
    return f" (efficiency {found.efficiency:.2f}{scale})"


def _waiting(share: float | None) -> list[str]:
    """Return the share of time spent waiting for data, empty if it is small."""
    return [f"{share:.0%} waiting for data"] if share is not None and share >= _WAIT_WORTH_SAYING else []


def _slowest(spread: RankSpread | None) -> list[str]:
    """Return the slowest rank, empty if it is hardly slower than the others."""
    return [spread_text(spread)] if spread is not None and spread.spread >= WORTH_SAYING else []


def _ranks(summary: Summary) -> list[str]:
    """Return the line on how far ranks are apart; none of a single rank."""
    spread, num_ranks = summary.ranks, len(summary.per_rank or ())
    if spread is None:
        return []
    steps = f"{spread.fastest_step_ms:.4g} to {spread.slowest_step_ms:.4g} ms a round"
    waiting = f"{spread.median_rank_wait_share:.1%} of training spent waiting for other ranks"
    return [fact("ranks", f"{num_ranks}, {steps}, {spread_text(spread)}; {waiting}")]


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < _LONG_LOSS else f"{value:.4g}"
