"""What the user of a search sees: a header, a live table of trials or a line per result, and what came of it.

Everything but the table also goes to console.log, which workers that share a folder share too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from crossbow_py.search.events import SearchInfo, SearchListener, SearchProgress, SearchSummary, TrialRecord
from crossbow_py.search.report.lines import final_lines, header_lines, progress_line, value_line
from crossbow_py.search.report.standing import last_epochs, leader, running_epochs, trained_epochs
from crossbow_py.search.report.table import live_table
from crossbow_py.search.rules import planned_epochs
from crossbow_py.telemetry.screen import Screen

PLAIN_INTERVAL_S = 30.0  # of silence, before a line says where the search stands
_WIDTH_FOR_A_BAR = 120  # columns: the bar takes 21, the line beside it 95 or so


class SearchConsole(SearchListener):
    """Talks to the terminal and to console.log.

    Args:
        log_path: console.log, appended to; None for none.
        screen: where to talk in its place.
        clock: monotonic seconds; plain lines and the time that is left depend on it.
    """

    def __init__(
        self, log_path: Path | None = None, screen: Screen | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._screen = screen or Screen(log_path)
        self._clock = clock
        self._info: SearchInfo | None = None
        self._trials: tuple[TrialRecord, ...] = ()
        self._said: set[tuple[int, float]] | None = None  # None: what was before is not known yet
        self._begun: tuple[float, float] | None = None  # seconds, and epochs that were trained before
        self._last_line_s = 0.0

    def on_start(self, info: SearchInfo) -> None:
        """The header, and the live table under it."""
        self._info = info
        if not info.num_finished_segments:
            self._said, self._begun = set(), (self._clock(), 0.0)
        for line in header_lines(info):
            self._say(line)
        self._screen.start_live()

    def on_progress(self, progress: SearchProgress) -> None:
        """Redraw the live table, or, without a terminal, a plain line after a while of silence."""
        if self._info is None:
            return
        line = progress_line(progress, self._remaining_s(self._info, progress))
        if self._screen.is_live:
            screen, shown = self._screen, self._with_bar(line, progress)
            screen.show(live_table(self._info, self._trials, progress, shown, (screen.width, screen.height)))
        elif self._clock() >= self._last_line_s + PLAIN_INTERVAL_S:
            self._say(line)

    def on_trials(self, trials: tuple[TrialRecord, ...]) -> None:
        """A line for each new value of this worker; where there is a table, only in the log."""
        self._trials = trials
        if self._info is None:
            return
        values = {(trial.trial, epochs) for trial in trials for epochs in trial.values}
        if self._begun is None:
            self._begun = self._clock(), trained_epochs(self._info.brackets, trials)
        new = sorted(values - self._said) if self._said is not None else []
        self._said = values
        best = leader(self._info.brackets, trials, maximize=self._info.maximize)
        by_number = {trial.trial: trial for trial in trials}
        for number, epochs in new:
            if by_number[number].worker == self._info.worker:
                is_best = best is not None and (best.trial, last_epochs(best)) == (number, epochs)
                self._say(value_line(self._info, by_number[number], epochs, is_best=is_best), to_live=False)

    def on_message(self, message: str) -> None:
        """A sentence that stays."""
        self._say(message)

    def on_end(self, summary: SearchSummary) -> None:
        """The last block."""
        self._screen.stop_live()
        for line in final_lines(summary):
            self._say(line)

    def close(self) -> None:
        """Give the terminal back and close the log."""
        self._screen.close()

    def _say(self, line: str, *, to_live: bool = True) -> None:
        self._last_line_s = self._clock()
        if to_live or not self._screen.is_live:
            self._screen.say(line)
        else:
            self._screen.note(line)

    def _with_bar(self, line: str, progress: SearchProgress) -> Table | Text:
        text = Text(line, no_wrap=True, overflow="ellipsis")
        if self._screen.width < _WIDTH_FOR_A_BAR:
            return text
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=progress.num_segments, completed=progress.num_finished, width=20), text)
        return row

    def _remaining_s(self, info: SearchInfo, progress: SearchProgress) -> float | None:
        """By the epochs that all workers trained since this one began; None before any."""
        if self._begun is None:
            return None
        seconds, before = self._begun
        trained = trained_epochs(info.brackets, self._trials) + running_epochs(info.brackets, progress.running)
        if trained <= before:
            return None
        left = max(0.0, planned_epochs(info.brackets) - trained)
        return (self._clock() - seconds) * left / (trained - before)
