"""A run in TensorBoard. The x-axis is samples seen, so that runs with different learner counts can be compared."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import summary_pb2  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from crossbow_py.telemetry.class_counts import ClassCounts, markdown_table
from crossbow_py.telemetry.events import EpochRecord, LearnerCount, Listener, Predictions, Progress, RunInfo, Summary
from crossbow_py.telemetry.learners import MOST_LEARNERS, learner_table
from crossbow_py.telemetry.pictures.confusion_picture import confusion_picture
from crossbow_py.telemetry.pictures.prediction_grid import prediction_grid
from crossbow_py.telemetry.pictures.rank_map import RankMap
from crossbow_py.telemetry.rank_pace import MOST_CURVES, RankPace, rank_table, spread_of
from crossbow_py.telemetry.scalars import (
    evaluation_scalars,
    finite_values,
    learner_scalars,
    next_point_s,
    training_scalars,
)
from crossbow_py.telemetry.system import SystemMonitor
from crossbow_py.telemetry.tensorboard.dashboard import dashboard
from crossbow_py.telemetry.tensorboard.hyper_parameters import columns_of_runs, ended, started

_MACHINE_INTERVAL_S = 5.0  # of training, between two samples of the machine


class MachineScalars(Listener):
    """Writes samples of the machine into an event file. Base of what writes a run's.

    Args:
        folder: the event file's folder.
        resumed_samples: points of an earlier process beyond that many samples are hidden; None hides them all.
        new_monitor: makes the machine's monitor when the run starts.
    """

    def __init__(self, folder: Path, resumed_samples: int | None, new_monitor: Callable[[], SystemMonitor]) -> None:
        self._folder, self._new_monitor = folder, new_monitor
        self._purge_step = 0 if resumed_samples is None else resumed_samples + 1
        self._writer: SummaryWriter | None = None
        self._monitor: SystemMonitor | None = None
        self._next_sample_s = 0.0
        self._warned = False
        self._is_hooked = False

    def on_start(self, info: RunInfo) -> None:
        if not self._is_hooked:
            self._is_hooked = True
            _quiet_threads.begin()
        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        self._monitor, self._next_sample_s, self._warned = self._new_monitor(), 0.0, False

    def on_progress(self, progress: Progress) -> None:
        if self._monitor is not None and self._writer is not None and progress.elapsed_s >= self._next_sample_s:
            self._next_sample_s = progress.elapsed_s + _MACHINE_INTERVAL_S
            self._add_scalars({**self._monitor.sample(), **self._sample_of_job(progress)}, progress.samples_seen)

    def _add_scalars(self, values: Mapping[str, float], samples_seen: int) -> None:
        """Write the values of one point as one event: eight ranks have tens of them, and every event takes time."""
        if values and self._writer is not None:
            points = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._add(summary_pb2.Summary(value=points), samples_seen)

    def _add(self, summary: summary_pb2.Summary, samples_seen: int | None = None) -> None:
        if self._writer is not None:
            file: Any = self._writer.file_writer
            file.add_summary(summary, samples_seen)

    def _sample_of_job(self, progress: Progress) -> Mapping[str, float]:
        """Return what is known of other nodes' machines."""
        return {}

    def _new_warning(self) -> str | None:
        """Return why a GPU cannot be read, once."""
        if self._warned or self._monitor is None or self._monitor.warning is None:
            return None
        self._warned = True
        return self._monitor.warning

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._writer is not None:
            with suppress(OSError):  # raised again for its thread, which a full disk has ended
                self._writer.close()
            self._writer = None
        if self._is_hooked:
            self._is_hooked = False
            _quiet_threads.end()


class _QuietThreads:
    """Keeps what has ended a thread of TensorBoard's from being printed: its writer raises it at the next call.

    Writers may be closed in any order; what the process had before is put back after the last.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._before = self._hook = threading.excepthook

    def begin(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = threading.excepthook
                self._hook = threading.excepthook = partial(_print_unless_raised_again, self._before)

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and threading.excepthook is self._hook:
                threading.excepthook = self._before


_quiet_threads = _QuietThreads()


def _print_unless_raised_again(before: Callable[..., object], args: threading.ExceptHookArgs) -> None:
    if not type(args.thread).__module__.startswith("tensorboard."):
        before(args)


class NodeScalars(MachineScalars):
    """Writes the machine of a node on which rank 0 is not, as a run of its own beside the run's curves."""

    def on_progress(self, progress: Progress) -> None:
        super().on_progress(progress)
        if self._writer is not None and (warning := self._new_warning()):
            self._writer.add_text("warning", warning, progress.samples_seen)  # rank 0 alone has a console

    def on_epoch(self, record: EpochRecord) -> None:
        if self._writer is not None:
            self._writer.flush()


class TensorBoardScalars(MachineScalars):
    """Writes one run's event file: curves, samples of the machine, pictures of predictions, hyper-parameters.

    Args:
        folder, resumed_samples, new_monitor: as of `MachineScalars`.
        config_text: the run's configuration, shown as text.
        interval_s: the least seconds of training between two points within an epoch.
    """

    def __init__(
        self,
        folder: Path,
        resumed_samples: int | None,
        config_text: str | None = None,
        interval_s: float = 0.5,
        new_monitor: Callable[[], SystemMonitor] = SystemMonitor,
    ) -> None:
        super().__init__(folder, resumed_samples, new_monitor)
        self._config_text, self._interval_s = config_text, interval_s
        self._num_devices = 1
        self._next_point_s = 0.0
        self._last_samples = -1
        self._paces: tuple[RankPace, ...] = ()
        self._rank_map = RankMap()
        self._learners: dict[int, SummaryWriter] = {}

    def on_start(self, info: RunInfo) -> None:
        super().on_start(info)
        assert self._writer is not None, "the base class has made it"
        self._num_devices = info.num_devices
        self._writer.add_custom_scalars(dashboard(info))
        self._add(columns_of_runs())
        run = self._folder.parent  # its name first: the table of runs cuts off the end
        self._add(started(info.hyper_parameters, f"{run.name} in {run.parent}", time.time()))
        if self._config_text is not None:
            indented = "\n".join("    " + line for line in self._config_text.splitlines())
            self._writer.add_text("config", indented, info.samples_seen)
        self._writer.flush()

    def on_progress(self, progress: Progress) -> None:
        """Write points within an epoch, ever more rarely."""
        super().on_progress(progress)
        now_s = progress.elapsed_s
        self._paces = progress.ranks or self._paces
        if now_s >= self._next_point_s:
            self._next_point_s = next_point_s(now_s, self._interval_s)
            self._write(progress.samples_seen, training_scalars(progress, self._num_devices))
            self._write_ranks(progress)

    def _sample_of_job(self, progress: Progress) -> Mapping[str, float]:
        return progress.gpus if self._num_devices > MOST_CURVES else {}

    def _write_ranks(self, progress: Progress) -> None:
        """Write the pace of every rank, or of many ranks the slowest, the median and the fastest, and a map of all.

        Curves of one run have one colour in TensorBoard; the map tells which rank is which.
        """
        self._write(progress.samples_seen, rank_scalars(progress.ranks))
        if self._writer is not None and len(progress.ranks) > 1:
            self._rank_map.add(progress.samples_seen, [each.step_ms for each in progress.ranks])
            if (picture := self._rank_map.due()) is not None:
                self._writer.add_image("ranks/step_map", picture, progress.samples_seen, dataformats="HWC")

    def on_epoch(self, record: EpochRecord) -> None:
        """Write the figures of a closed epoch; those of independent learners as runs beside it, under the same tags."""
        evaluated = evaluation_scalars(record)
        if record.samples_seen != self._last_samples:
            evaluated |= training_scalars(record, self._num_devices)
        self._write(record.samples_seen, evaluated)
        if self._writer is not None:
            if self._paces:
                self._writer.add_text("ranks", rank_table(self._paces), record.samples_seen)
            self._writer.flush()
        for index, own in enumerate(learner_scalars(record)[:MOST_LEARNERS]):
            self._write_learner(index, finite_values(own), record.samples_seen)

    def _write_learner(self, index: int, values: Mapping[str, float], samples_seen: int) -> None:
        """Write a learner's figures; runs differ in colour in TensorBoard, and tags of one run do not."""
        if index not in self._learners:
            folder = self._folder / f"learner_{index}"
            self._learners[index] = SummaryWriter(str(folder), purge_step=self._purge_step)
        for tag, value in values.items():
            self._learners[index].add_scalar(tag, value, samples_seen)
        self._learners[index].flush()

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
        self._add(ended(failed=summary.status == "failed", now_s=time.time()))
        if self._writer is not None:
            if (picture := self._rank_map.last()) is not None:
                self._writer.add_image("ranks/step_map", picture, summary.samples_seen, dataformats="HWC")
            if summary.time_to_accuracy_s is not None:
                self._writer.add_scalar("time/to_accuracy_s", summary.time_to_accuracy_s, summary.samples_seen)
            text = f"{summary.status}: {summary.stop_reason}; test accuracy {summary.test_accuracy}"
            self._writer.add_text("result", text, summary.samples_seen)
            if summary.learners is not None:
                self._writer.add_text("learners", learner_table(summary.learners), summary.samples_seen)
            self._writer.flush()

    def close(self) -> None:
        for writer in self._learners.values():
            with suppress(OSError):  # as of the run itself
                writer.close()
        self._learners.clear()
        super().close()

    def take_notes(self) -> list[str]:
        warning = self._new_warning()
        return [] if warning is None else [warning]

    def _write(self, samples_seen: int, values: Mapping[str, float | None]) -> None:
        self._last_samples = samples_seen
        self._add_scalars(finite_values(values), samples_seen)


def rank_scalars(paces: Sequence[RankPace]) -> dict[str, float | None]:
    """Return the pace of ranks by tags: of each, or of many the slowest, the median and the fastest."""
    spread = spread_of(paces)
    if spread is None:
        return {}
    found: dict[str, float | None] = {"ranks/spread": spread.spread}
    rates = {each.rank: each.images_per_s if each.tokens_per_s is None else each.tokens_per_s for each in paces}
    unit = "images_per_s" if paces[0].tokens_per_s is None else "tokens_per_s"
    if len(paces) <= MOST_CURVES:
        for each in paces:
            found |= {
                f"rank/{each.rank}/step_ms": each.step_ms,
                f"rank/{each.rank}/{unit}": rates[each.rank],
                f"rank/{each.rank}/rank_wait_share": each.rank_wait_share,
                f"rank/{each.rank}/data_wait_share": each.data_wait_share,
            }
        return found
    ordered = sorted(rates.values())
    return found | {
        "ranks/step_ms/slowest": spread.slowest_step_ms,
        "ranks/step_ms/median": spread.median_step_ms,
        "ranks/step_ms/fastest": spread.fastest_step_ms,
        f"ranks/{unit}/slowest": ordered[0],
        f"ranks/{unit}/median": statistics.median(ordered),
        f"ranks/{unit}/fastest": ordered[-1],
        "ranks/rank_wait_share/median": spread.median_rank_wait_share,
        "ranks/data_wait_share/most": spread.most_data_wait_share,
    }
