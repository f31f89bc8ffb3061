"""search.json: how a search stands while it goes on, and how it ended."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossbow_py.core.settings import read_as
from crossbow_py.core.version import __version__
from crossbow_py.search.events import (
    SEARCH_FILE,
    BestTrial,
    SearchInfo,
    SearchListener,
    SearchProgress,
    SearchSummary,
    TrialRecord,
)
from crossbow_py.search.report.standing import last_epochs, leader
from crossbow_py.telemetry.records import write_json

_RUNNING = "running"
_BEST_KEYS = tuple(field.name for field in dataclasses.fields(BestTrial))
_OF_THE_WORKER = (  # in the order of their keys in search.json
    "samples", "images_per_s", "wall_time_s", "loading_time_s", "train_time_s", "evaluation_time_s", "tuning_time_s",
    "waiting_time_s", "overhead_time_s",
)  # fmt: skip
_INTERVAL_S = 3.0  # between two versions of the file while the search goes on


class SearchFile(SearchListener):
    """Keeps search.json: with `status` running while the search goes on, so that a killed one shows what it has.

    A disk that is full does not end the search: what is missing is said.

    Args:
        folder: the search's folder; several workers may write there, each the results of all.
        say: takes sentences for the user.
        clock: monotonic seconds.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._say, self._clock = folder / SEARCH_FILE, say, clock
        self._info: SearchInfo | None = None
        self._trials: tuple[TrialRecord, ...] = ()
        self._is_new = False
        self._next_s = self._begun_s = clock()

    def on_start(self, info: SearchInfo) -> None:
        """A search that is new shows at once that it runs; one that goes on keeps what is there until it knows more."""
        self._info = info
        if not self._path.exists():
            self._write(running_plain(info, (), 0.0))

    def on_trials(self, trials: tuple[TrialRecord, ...]) -> None:
        self._trials, self._is_new = trials, True
        self._write_now_and_then()

    def on_progress(self, progress: SearchProgress) -> None:
        self._write_now_and_then()

    def on_end(self, summary: SearchSummary) -> None:
        self._write(ended_plain(summary))

    def _write_now_and_then(self) -> None:
        if self._info is not None and self._is_new and self._clock() >= self._next_s:
            self._next_s, self._is_new = self._clock() + _INTERVAL_S, False
            self._write(running_plain(self._info, self._trials, self._clock() - self._begun_s))

    def _write(self, plain: dict[str, Any]) -> None:
        try:
            write_json(self._path, plain, indent=1)
        except OSError as error:
            self._say(f"{self._path} was not written ({error.strerror or error}).")


def running_plain(info: SearchInfo, trials: Sequence[TrialRecord], elapsed_s: float) -> dict[str, Any]:
    """A search that goes on, as plain values; `best` is the one that leads, without what is found out at the end."""
    return {
        "experiment": info.experiment,
        "status": _RUNNING,
        "best": _leader(info, trials),
        "wall_time_s": elapsed_s,
        "trials": [trial_plain(trial) for trial in trials],
        "info": info_plain(info),
        "versions": {"crossbow_py": __version__},
    }


def ended_plain(summary: SearchSummary) -> dict[str, Any]:
    """Return a search that has ended, as plain values. Times and samples are those of the worker that writes."""
    wall_s = summary.wall_time_s
    return {
        "experiment": summary.info.experiment,
        "status": summary.status,
        "best": _leader(summary.info, summary.trials) if summary.best is None else dataclasses.asdict(summary.best),
        **{name: getattr(summary, name) for name in _OF_THE_WORKER},
        "overhead_share": summary.overhead_time_s / wall_s if wall_s else 0.0,
        "notes": list(summary.notes),
        "trials": [trial_plain(trial) for trial in summary.trials],
        "info": info_plain(summary.info),
        "versions": dict(summary.versions),
    }


def recorded_summary(
    plain: Mapping[str, Any], info: SearchInfo, trials: tuple[TrialRecord, ...]
) -> SearchSummary | None:
    """Return the summary of a search that has ended, from search.json; None if the file has none.

    Anybody may have written the file, so every value is checked.
    """
    kept = {field.name for field in dataclasses.fields(SearchSummary)} - {"info", "trials"}
    given = {name: value for name, value in plain.items() if name in kept}
    if given.get("best") is not None:
        given["best"] = read_as(BestTrial, given["best"])
        if given["best"] is None:  # one that was stopped from outside has a leader alone
            return None
    return read_as(SearchSummary, {"info": info, "trials": trials, **given})


def recorded_best(plain: Mapping[str, Any], trial: TrialRecord) -> BestTrial | None:
    """Return what search.json says of the best trial of a search that has ended; None if it is another, or not whole.

    What can be known otherwise is taken from the record of the trial: anybody may have written the file.
    """
    best, epochs = read_as(BestTrial, plain.get("best")), last_epochs(trial)
    if best is None or (best.trial, best.value) != (trial.trial, trial.values[epochs]):
        return None
    return dataclasses.replace(best, epochs=epochs, params=trial.params or {})


def trial_plain(trial: TrialRecord) -> dict[str, Any]:
    """Return a trial; `values` by epochs as text, because keys are text in JSON."""
    plain = {field.name: getattr(trial, field.name) for field in dataclasses.fields(trial)}
    values = {f"{epochs:g}": value for epochs, value in sorted(trial.values.items())}
    return {**plain, "state": str(trial.state), "values": values, "params": trial.params and dict(trial.params)}


def info_plain(info: SearchInfo) -> dict[str, Any]:
    """Return the facts of the start as plain values."""
    plain = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    brackets = [{"trials": each.num_trials, "epochs": each.epochs, "sizes": each.sizes} for each in info.brackets]
    return {**plain, "brackets": brackets, "space": info.space.to_plain()}


def _leader(info: SearchInfo, trials: Sequence[TrialRecord]) -> dict[str, Any] | None:
    """Return the trial that leads, with the keys of `BestTrial`; null for what is found out when a search is over."""
    trial = leader(info.brackets, trials, maximize=info.maximize)
    if trial is None:
        return None
    plain = dict.fromkeys(_BEST_KEYS)
    value, params = trial.values[last_epochs(trial)], trial_plain(trial)["params"]
    return {**plain, "trial": trial.trial, "value": value, "epochs": last_epochs(trial), "params": params}
