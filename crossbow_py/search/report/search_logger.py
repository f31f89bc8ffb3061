"""A search in a tracking service: a run with the best value so far, in the end with its trials and its files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from crossbow_py.core.settings import flat
from crossbow_py.search.events import (
    SEARCH_FILE,
    BestTrial,
    SearchInfo,
    SearchListener,
    SearchProgress,
    SearchSummary,
    TrialRecord,
)
from crossbow_py.search.hyperband import TrialState
from crossbow_py.search.loop import epoch_samples
from crossbow_py.search.report.standing import leader
from crossbow_py.search.report.tensorboard import BEST_TAG, PACE_TAG, samples_of_all, trial_tag
from crossbow_py.telemetry.console import CONSOLE_LOG
from crossbow_py.telemetry.loggers.tracker import END, RUNNING, Courier, Plain, Subject, Tracker, TrialRun
from crossbow_py.telemetry.scalars import finite_values

_FILES = (SEARCH_FILE, CONSOLE_LOG)  # not config.yaml, which may have the password of a storage
_SETTINGS = (
    "experiment", "data", "method", "sampler", "metric", "maximize", "num_trials", "max_epochs", "seed", "policy",
)  # fmt: skip


class SearchLogger(SearchListener):
    """Records a search: the best value over the samples of all trials, and in the end every trial that has ended.

    Workers of a search share one run where the service can; elsewhere each has its own, in a group.

    Args:
        tracker: the service.
        say: takes sentences for the user.
    """

    def __init__(self, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._tracker, self._say = tracker, say
        self._info: SearchInfo | None = None
        self._courier: Courier | None = None
        self._samples = self._num_others = 0
        self._last: tuple[int, float] | None = None

    def on_start(self, info: SearchInfo) -> None:
        """Begin the run, or go on with it. Raises UserError if the service cannot be reached."""
        subject = Subject(
            experiment=info.experiment,
            folder=None if info.output_dir is None else Path(info.output_dir),
            parameters={
                **{name: getattr(info, name) for name in _SETTINGS},
                **{f"space.{each.key}": each.describe() for each in info.space.parameters},
            },
            facts={"device": info.device, "precision": info.precision, "storage": info.storage},
            continues=self._tracker.IS_SHARED,
            worker=None if self._tracker.IS_SHARED else info.worker,
        )
        for sentence in self._tracker.open(subject):
            self._say(sentence)
        self._info, self._courier = info, Courier(self._tracker)

    def on_trials(self, trials: tuple[TrialRecord, ...]) -> None:
        if self._info is None or self._courier is None:
            return
        self._samples = samples_of_all(self._info, trials)
        best = leader(self._info.brackets, trials, maximize=self._info.maximize)
        if best is not None and best.value is not None and self._last != (self._samples, best.value):
            self._last = self._samples, best.value
            self._courier.add(self._samples, finite_values({BEST_TAG: best.value}))
        self._say_problems(self._courier)

    def on_progress(self, progress: SearchProgress) -> None:
        if self._courier is not None:
            self._say_problems(self._courier)

    def on_leave(self, num_others: int) -> None:
        self._num_others = num_others

    def on_end(self, summary: SearchSummary) -> None:
        """Send trials, files and figures, and wait for all to arrive, for at most a minute."""
        self.on_trials(summary.trials)
        if self._info is None or self._courier is None:
            return
        self._courier.add(self._samples, finite_values({PACE_TAG: summary.images_per_s}))
        self._courier.do("trials", self._tracker.trials, _ended(self._info, summary.trials), trial_tag(self._info))
        if self._info.output_dir is not None:
            folder = Path(self._info.output_dir)
            for path in [folder / name for name in _FILES] + sorted(folder.glob("*.png")):
                if path.is_file():
                    self._courier.do(path.name, self._tracker.file, path)
        status = self._status(summary.status)
        figures, facts = _best(summary.best)
        self._courier.do(END, self._tracker.end, status, self._samples, figures, {"status": status, **facts})
        for sentence in self._courier.finish():
            self._say(sentence)
        self._courier = None

    def close(self) -> None:
        """End a run that was not told how the search ended as one that failed."""
        if self._courier is not None:
            status = self._status("failed")
            self._courier.do(END, self._tracker.end, status, self._samples, {}, {"status": status})
            self._courier.close()
            self._courier = None

    def _status(self, own: str) -> str:
        """Return the status to record: that of this worker's end, unless others go on with a search they share."""
        goes_on = self._tracker.IS_SHARED and self._num_others and own != "finished"
        return RUNNING if goes_on else own

    def _say_problems(self, courier: Courier) -> None:
        for problem in courier.problems():
            self._say(problem)


def _best(best: BestTrial | None) -> tuple[dict[str, float], dict[str, Plain]]:
    """Return the figures of the best trial, and what else is known of it."""
    if best is None:
        return {}, {}
    figures = {
        "best/trial": best.trial,
        "best/value": best.value,
        "best/epochs": best.epochs,
        "best/test_accuracy": best.test_accuracy,
        "best/test_loss": best.test_loss,
    }
    parameters = flat({"best": dict(best.params)})
    return finite_values(figures), {**parameters, "best.command": best.command}


def _ended(info: SearchInfo, trials: Iterable[TrialRecord]) -> list[TrialRun]:
    return [
        TrialRun(
            number=trial.trial,
            parameters=flat(trial.params),
            values={
                epoch_samples(epochs, info.num_train_samples): value
                for epochs, value in sorted(trial.values.items())
                if math.isfinite(value)
            },
            failed=trial.state is TrialState.FAILED,
        )
        for trial in trials
        if trial.state.has_ended and trial.params is not None
    ]
