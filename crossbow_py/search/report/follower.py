"""The lines on the terminal about a search that other processes train, by the results in its storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from crossbow_py.core.signals import StopSignal
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.events import SEARCH_FILE, TrialRecord
from crossbow_py.search.report.console import (
    PLAIN_INTERVAL_S,
    NewResults,
    best_lines,
    last_lines,
    leader_lines,
    outcome_lines,
)
from crossbow_py.search.report.search_file import recorded_best
from crossbow_py.search.report.standing import last_epochs, leader, num_results
from crossbow_py.telemetry.records import BEST_FOLDER, read_json
from crossbow_py.telemetry.screen import clock_time, counted, fact

_LOOK_S = 1.0  # between two looks into the storage


class Follower:
    """Says how a search stands that others train: a line for each result of any worker, and in the end the best.

    Args:
        config: the configuration.
        maximize: whether greater values are better.
        records: returns all trials as they stand.
        say: takes lines for the user.
        is_new: whether the search had no results when it was started here.
        clock: monotonic seconds.
    """

    def __init__(
        self, config: SearchConfig, maximize: bool, records: Callable[[], tuple[TrialRecord, ...]],
        say: Callable[[str], None], *, is_new: bool, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._config, self._maximize, self._records, self._clock = config, maximize, records, clock
        self._tell = say
        self._brackets, self._metric = config.brackets(), f"validation_{config.metric}"
        self._num_segments = sum(sum(bracket.sizes) for bracket in self._brackets)
        self._results = NewResults(self._brackets, self._metric, maximize, clock, is_new=is_new)
        self._is_new = is_new
        self._begun_s = self._last_line_s = clock()
        self._next_s = self._begun_s

    def look(self, num_workers: int) -> None:
        """Say what is new, about once a second; after a while without news, how the search stands."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + _LOOK_S
        trials = self._news()
        if now >= self._last_line_s + PLAIN_INTERVAL_S:
            self._say(self._progress_line(trials, num_workers))

    def end(self, status: str, folder: Path) -> None:
        """Say how the search has ended, whose files are in a folder of this machine or of its workers'."""
        trials = self._news()
        best = leader(self._brackets, trials, maximize=self._maximize)
        is_stopped = status in StopSignal.REASONS
        recorded = None if best is None or is_stopped else recorded_best(read_json(folder / SEARCH_FILE), best)
        lines = outcome_lines(self._config.experiment, status, trials)
        if recorded is not None:
            lines += best_lines(self._metric, self._config.max_epochs, recorded)
        else:
            lines += leader_lines(self._metric, self._brackets, trials, maximize=self._maximize)
        if recorded is None and best is not None and best.worker is not None and not is_stopped:
            lines.append(fact("model", f"{folder / BEST_FOLDER} on {best.worker.rpartition(':')[0]}"))
        lines.append(fact("time", f"{self._clock() - self._begun_s:.1f} s"))
        for line in [*lines, *last_lines(status, str(folder))]:
            self._say(line)

    def _say(self, line: str) -> None:
        self._last_line_s = self._clock()
        self._tell(line)

    def _news(self) -> tuple[TrialRecord, ...]:
        """Say each value that is new. Return all trials as they stand."""
        trials = self._records()
        lines = self._results.lines(trials)
        if not self._is_new:  # what was there before is no news
            self._is_new = True
            self._say(f"going on: {sum(map(num_results, trials))} of {self._num_segments} rungs are done")
        for _, line in lines:
            self._say(line)
        return trials

    def _progress_line(self, trials: tuple[TrialRecord, ...], num_workers: int) -> str:
        parts = [f"{sum(map(num_results, trials))} of {self._num_segments} rungs"]
        best = leader(self._brackets, trials, maximize=self._maximize)
        if best is not None:
            parts.append(f"best {best.values[last_epochs(best)]:.4f} by trial {best.trial}")
        remaining_s = self._results.remaining_s(trials)
        if remaining_s is not None:
            parts.append(f"about {clock_time(remaining_s)} left")
        so_far = f"{clock_time(self._clock() - self._begun_s)} so far"
        return " · ".join([*parts, so_far, counted(num_workers, "worker")])
