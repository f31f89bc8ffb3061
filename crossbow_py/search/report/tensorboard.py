"""A search in TensorBoard: each trial is a run with its hyper-parameters and values, each worker one with its pace.

A trial has a file for each rung and one for its end, with names that follow from the trial alone. The first worker that
has the values writes a file, whole or not at all; other workers of the folder leave it.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import summary_v2  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from crossbow_py.core.errors import unwritable
from crossbow_py.core.files import replacing
from crossbow_py.core.settings import flat
from crossbow_py.search.events import SearchInfo, SearchListener, SearchProgress, SearchSummary, TrialRecord
from crossbow_py.search.hyperband import TrialState, bracket_of
from crossbow_py.search.loop import epoch_samples
from crossbow_py.search.report.standing import failures, last_epochs, leader, num_results
from crossbow_py.search.space import Parameter
from crossbow_py.telemetry.tensorboard.hyper_parameters import columns, ended, started

BEST_TAG = "search/best_value_by_samples_of_all_trials"
PACE_TAG = "search/images_per_s_by_samples_of_all_trials"  # of one worker

_LAST = 10**6  # position of the file that is read last
_FLUSH_S = 10
_FILE_VERSION = "brain.Event:2"  # the format TensorBoard reads


class SearchTensorBoard(SearchListener):
    """Writes the event files of a search.

    A trial is the run `trial_00007`; its curve has the samples that it has seen as its x-axis. What goes on over a
    search, in the run `worker_HOST_PROCESS`, has those that the trials of all workers have seen together. What is under
    way is not counted before it is measured: so a search that goes on after it was killed draws nothing to the left.

    Args:
        folder: where TensorBoard looks.
        say: takes sentences for the user on what could not be written.
        clock: seconds since the epoch, of the events.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._folder, self._say, self._clock = folder, say, clock
        self._info: SearchInfo | None = None
        self._writer: SummaryWriter | None = None
        self._written: set[tuple[int, str]] = set()
        self._known: dict[int, tuple[int, TrialState]] = {}  # by trial: what has been looked at
        self._samples: int | None = None  # of all trials; None: what was before is not known yet
        self._best_point: tuple[int, float] | None = None
        self._pace_samples: int | None = None  # at its last point

    def on_start(self, info: SearchInfo) -> None:
        """Names and ranges of the hyper-parameters come first. Raises UserError when the folder cannot be written."""
        self._info = info
        own = f"worker_{re.sub('[^A-Za-z0-9.-]', '_', info.worker)}"
        try:
            self._writer = SummaryWriter(str(self._folder / own), flush_secs=_FLUSH_S)
        except OSError as error:  # such as a file of that name
            raise unwritable(self._folder / own, error) from error
        self._write(self._folder / _file_name(0, "space"), [(0, experiment_summary(info))])

    def on_trials(self, trials: tuple[TrialRecord, ...]) -> None:
        if self._info is None or self._writer is None:
            return
        for trial in trials:
            if self._known.get(trial.trial) != (num_results(trial), trial.state):
                self._known[trial.trial] = (num_results(trial), trial.state)
                for name, events in trial_files(self._info, trial, self._clock()).items():
                    if (trial.trial, name) not in self._written:
                        self._written.add((trial.trial, name))
                        self._write(self._folder / f"trial_{trial.trial:05}" / name, events)
        self._samples = samples_of_all(self._info, trials)
        best = leader(self._info.brackets, trials, maximize=self._info.maximize)
        if best is not None and best.value is not None and self._best_point != (self._samples, best.value):
            self._best_point = (self._samples, best.value)
            self._writer.add_scalar(BEST_TAG, best.value, self._samples)

    def on_progress(self, progress: SearchProgress) -> None:
        if self._writer is not None and self._samples != self._pace_samples and progress.images_per_s > 0:
            self._pace_samples = self._samples
            self._writer.add_scalar(PACE_TAG, progress.images_per_s, self._samples)

    def on_end(self, summary: SearchSummary) -> None:
        self.on_trials(summary.trials)
        if self._writer is not None and summary.best is not None:
            best = summary.best
            text = f"{summary.status}: trial {best.trial}, {summary.info.metric} {best.value}"
            text += f", test accuracy {best.test_accuracy}"
            self._writer.add_text("result", text, self._samples)
        if self._writer is not None and (failed := failures(summary.trials)):
            lines = [f"- {', '.join(map(str, own))}: `{reason.replace('`', ' ')}`" for reason, own in failed.items()]
            self._writer.add_text("failed_trials", "\n".join(lines), self._samples)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, path: Path, events: Iterable[tuple[int, Summary]]) -> None:
        try:
            if not path.exists():
                buffer, now = io.BytesIO(), self._clock()
                records = RecordWriter(buffer)
                records.write(Event(wall_time=now, file_version=_FILE_VERSION).SerializeToString())
                for step, summary in events:
                    records.write(Event(wall_time=now, step=step, summary=summary).SerializeToString())
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as partial:
                    partial.write_bytes(buffer.getvalue())
        except OSError as error:  # a full disk does not end the search
            self._say(f"{path} was not written ({error.strerror or error}).")


def experiment_summary(info: SearchInfo) -> Summary:
    """The hyper-parameters with what they may be, and the one metric: what TensorBoard makes columns and filters of."""
    hparams = [_hparam(parameter) for parameter in info.space.parameters]
    metric = summary_v2.Metric(trial_tag(info), display_name=info.metric.replace("_", " "))
    return columns(hparams, [metric])


def trial_tag(info: SearchInfo) -> str:
    """Return the curve of a trial."""
    return f"search/{info.metric}_by_samples_seen"


def samples_of_all(info: SearchInfo, trials: Iterable[TrialRecord]) -> int:
    """Samples that all trials together have seen at their last values; a segment in which one failed adds none."""
    return sum(epoch_samples(last_epochs(trial), info.num_train_samples) for trial in trials if trial.values)


def trial_files(info: SearchInfo, trial: TrialRecord, now: float) -> dict[str, list[tuple[int, Summary]]]:
    """Return the summaries of a trial that has begun, with their x-axis values, by the files they go to.

    TensorBoard reads the files of a run in the order of their names.
    """
    if trial.params is None or not num_results(trial):
        return {}
    # TensorBoard takes runs of one name for repetitions of one, also of several searches. Names sort as numbers do.
    group = f"trial {trial.trial:0{len(str(info.num_trials - 1))}}"
    group = group if info.output_dir is None else f"{Path(info.output_dir)} {group}"
    found = {_file_name(0, "start"): [(0, started(flat(trial.params), group, now))]}
    for rung, epochs in enumerate(bracket_of(info.brackets, trial.trial).epochs):
        value = trial.values.get(epochs)
        if value is not None and math.isfinite(value):
            samples = epoch_samples(epochs, info.num_train_samples)
            point = Summary(value=[Summary.Value(tag=trial_tag(info), simple_value=value)])
            found[_file_name(1 + rung, f"rung_{rung}")] = [(samples, point)]
    if trial.state.has_ended:
        found[_file_name(_LAST, "end")] = [(0, ended(failed=trial.state is TrialState.FAILED, now_s=now))]
    return found


def _hparam(parameter: Parameter) -> summary_v2.HParam:
    if parameter.choices is None:
        assert parameter.low is not None and parameter.high is not None, "a range has ends"  # noqa: PT018
        return summary_v2.HParam(parameter.key, summary_v2.RealInterval(float(parameter.low), float(parameter.high)))
    choices = list(flat({str(n): choice for n, choice in enumerate(parameter.choices)}).values())
    # TensorBoard has no column of mixed types; whole numbers and others are one.
    kinds = {float if type(choice) is int else type(choice) for choice in choices}
    if kinds == {float}:
        choices = [float(choice) for choice in choices]
    return summary_v2.HParam(parameter.key, summary_v2.Discrete(choices) if len(kinds) == 1 else None)


def _file_name(position: int, what: str) -> str:
    return f"events.out.tfevents.{position:010}.{what}"
