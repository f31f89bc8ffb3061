"""The console of a search: a header, a live table of trials or a line per result, and the outcome.

Everything but the table also goes to console.log, which workers that share a folder share too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from crossbow_py.core.signals import StopSignal
from crossbow_py.search.events import (
    SEARCH_FILE,
    BestTrial,
    RunningTrial,
    SearchInfo,
    SearchListener,
    SearchProgress,
    SearchSummary,
    TrialRecord,
)
from crossbow_py.search.hyperband import Bracket, TrialState, bracket_of, planned_epochs
from crossbow_py.search.report.standing import (
    as_text,
    failures,
    last_epochs,
    leader,
    ranked,
    running_epochs,
    short_names,
    trained_epochs,
)
from crossbow_py.telemetry.console import folder_lines
from crossbow_py.telemetry.screen import Screen, ScreenConsole, clock_time, counted, fact

PLAIN_INTERVAL_S = 30.0  # of silence, before a line says where the search stands
_LINES_AROUND = 5  # two of the table's head, the counts, the progress line, and the cursor's
_FEWEST_ROWS = 2
_MOST_BEST = 10
_MOST_REASONS, _MOST_NUMBERS = 5, 8  # of trials that failed
_RUNNING_SHARE = 2 / 3  # of the rows, when there are more trials than rows
_BAR = 8
_PADDING = 2
_STATE_WIDTH = _BAR + 5
_TRIAL_WIDTH, _BRACKET_WIDTH, _EPOCHS_WIDTH, _VALUE_WIDTH = 6, 7, 9, 8
_MARK = "*"


class SearchConsole(ScreenConsole, SearchListener):
    """Talks to the terminal and to console.log.

    Args:
        screen: the terminal and console.log.
        clock: monotonic seconds; plain lines and the time that is left depend on it.
    """

    WIDTH_FOR_A_BAR: ClassVar[int] = 120

    def __init__(self, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(screen, clock)
        self._info: SearchInfo | None = None
        self._trials: tuple[TrialRecord, ...] = ()
        self._results: NewResults | None = None
        self._last_line_s = 0.0

    def on_start(self, info: SearchInfo) -> None:
        self._info = info
        is_new = not info.num_finished_segments
        self._results = NewResults(info.brackets, info.metric, info.maximize, self._clock, is_new=is_new)
        self._begin(header_lines(info))

    def on_progress(self, progress: SearchProgress) -> None:
        if self._info is None or self._results is None:
            return
        line, screen = progress_line(progress, self._results.remaining_s(self._trials, progress.running)), self._screen
        if screen.is_live:
            shown = self._with_bar(line, progress.num_finished, progress.num_segments)
            screen.show(live_table(self._info, self._trials, progress, shown, (screen.width, screen.height)))
        elif self._clock() >= self._last_line_s + PLAIN_INTERVAL_S:
            self._say(line)

    def on_trials(self, trials: tuple[TrialRecord, ...]) -> None:
        """A line for each new value of this worker; where there is a table, only in the log."""
        self._trials = trials
        if self._info is not None and self._results is not None:
            for trial, line in self._results.lines(trials):
                if trial.worker == self._info.worker:
                    self._say(line, to_live=False)

    def on_end(self, summary: SearchSummary) -> None:
        self._end(final_lines(summary))

    def _say(self, line: str, *, to_live: bool = True) -> None:
        self._last_line_s = self._clock()
        if to_live or not self._screen.is_live:
            self._screen.say(line)
        else:
            self._screen.note(line)


class NewResults:
    """The results that the user has not seen yet, and the time that is left by what was trained meanwhile.

    Args:
        brackets, metric, maximize: those of the search.
        clock: monotonic seconds.
        is_new: whether the search has no results yet; else the first trials that are given are not news.
    """

    def __init__(
        self, brackets: Sequence[Bracket], metric: str, maximize: bool, clock: Callable[[], float], *, is_new: bool
    ) -> None:
        self._brackets, self._metric, self._maximize, self._clock = brackets, metric, maximize, clock
        self._shown: set[tuple[int, float]] | None = set() if is_new else None
        self._begun_s, self._epochs_before = clock(), 0.0

    def lines(self, trials: Sequence[TrialRecord]) -> list[tuple[TrialRecord, str]]:
        """Return a line for each new value, with its trial."""
        values = {(trial.trial, epochs) for trial in trials for epochs in trial.values}
        if self._shown is None:
            self._shown, self._begun_s = values, self._clock()
            self._epochs_before = trained_epochs(self._brackets, trials)
        new, self._shown = sorted(values - self._shown), values
        best, by_number = leader(self._brackets, trials, maximize=self._maximize), {each.trial: each for each in trials}
        last = None if best is None else (best.trial, last_epochs(best))
        return [
            (by_number[number], value_line(self._metric, by_number[number], epochs, is_best=(number, epochs) == last))
            for number, epochs in new
        ]

    def remaining_s(self, trials: Sequence[TrialRecord], running: Sequence[RunningTrial] = ()) -> float | None:
        """Return the time left, by the epochs that all workers trained since this began; None before any."""
        done = trained_epochs(self._brackets, trials) + running_epochs(self._brackets, running)
        if self._shown is None or done <= self._epochs_before:
            return None
        left = max(0.0, planned_epochs(self._brackets) - done)
        return (self._clock() - self._begun_s) * left / (done - self._epochs_before)


def header_lines(info: SearchInfo) -> list[str]:
    """Return the lines of the header."""
    *rungs, last = (f"{each:.4g}" for each in sorted({each for bracket in info.brackets for each in bracket.epochs}))
    measured_at = " and ".join(filter(None, [", ".join(rungs), last]))
    lines = [
        f"{info.experiment}: {info.num_trials} trials on {info.data}, {info.sampler} sampling, {info.method} in "
        f"{counted(info.num_brackets, 'bracket')}, measured at {measured_at} epochs",
        f"{'greatest' if info.maximize else 'least'} {_words(info.metric)} wins · packing {info.policy} · "
        f"{info.device} · {info.precision} · seed {info.seed} · worker {info.worker}",
        f"storage {info.storage}",
    ]
    if info.output_dir:
        lines.append(f"writing to {info.output_dir}")
    if info.num_finished_segments:
        planned = sum(sum(bracket.sizes) for bracket in info.brackets)
        lines.append(f"going on: {info.num_finished_segments} of {planned} rungs are done")
    return lines


def value_line(metric: str, trial: TrialRecord, epochs: float, *, is_best: bool) -> str:
    """Return a trial at a rung; `is_best` when no trial got further, and none that got as far has a better value."""
    best = " (best so far at this rung)" if is_best else ""
    parts = [f"trial {trial.trial} at {_epochs(epochs)}: {_words(metric)} {trial.values[epochs]:.4f}{best}"]
    params = trial.params or {}
    return " · ".join([*parts, *(f"{name} {as_text(params[key])}" for key, name in short_names(list(params)).items())])


def progress_line(progress: SearchProgress, remaining_s: float | None) -> str:
    """Return the state of the search on one line."""
    parts = [f"{progress.num_finished} of {progress.num_segments} rungs"]
    if progress.best_trial is not None and progress.best_value is not None:
        parts.append(f"best {progress.best_value:.4f} by trial {progress.best_trial}")
    if remaining_s is not None:
        parts.append(f"about {clock_time(remaining_s)} left")
    return " · ".join([*parts, f"{clock_time(progress.elapsed_s)} so far", f"{progress.images_per_s:,.0f} images/s"])


def final_lines(summary: SearchSummary) -> list[str]:
    """Return the last block: how the search ended, the best trial, where the time went and where the files are."""
    info = summary.info
    lines = outcome_lines(info.experiment, summary.status, summary.trials)
    if summary.best is None:
        lines += leader_lines(info.metric, info.brackets, summary.trials, maximize=info.maximize)
    else:
        lines += best_lines(info.metric, info.max_epochs, summary.best)
    lines += [fact("time", _times(summary)), fact("throughput", f"{summary.images_per_s:,.0f} images/s while training")]
    return lines + last_lines(summary.status, info.output_dir)


def outcome_lines(experiment: str, status: str, trials: Sequence[TrialRecord]) -> list[str]:
    """Return the first lines of the last block: how the search ended, trials by their state, why some failed."""
    counts = Counter(str(trial.state) for trial in trials)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    return ["", f"{experiment} {status}: {len(trials)} trials ({states})", *_failed_lines(trials)]


def _failed_lines(trials: Sequence[TrialRecord]) -> list[str]:
    """Return why trials failed, a line for each of the most frequent reasons."""
    found = list(failures(trials).items())
    lines = [f"{_numbers(numbers)}: {reason}" for reason, numbers in found[:_MOST_REASONS]]
    left_out = sum(len(numbers) for _, numbers in found[_MOST_REASONS:])
    lines += [f"{left_out} more, each with its reason in {SEARCH_FILE}"] if left_out else []
    return [fact("" if n else "failed", text) for n, text in enumerate(lines)]


def _numbers(trials: Sequence[int]) -> str:
    shown = ", ".join(map(str, trials[:_MOST_NUMBERS]))
    more = f" and {len(trials) - _MOST_NUMBERS} more" if len(trials) > _MOST_NUMBERS else ""
    return f"trial{'' if len(trials) == 1 else 's'} {shown}{more}"


def last_lines(status: str, folder: str | None) -> list[str]:
    """Return the last lines of the last block: where the files are, and how a search that was stopped goes on."""
    lines = folder_lines("folder", folder) if folder else []
    if status in StopSignal.REASONS:
        lines.append(fact("to go on", "the same command: what is finished is kept"))
    return lines


def leader_lines(
    metric: str, brackets: Sequence[Bracket], trials: Sequence[TrialRecord], *, maximize: bool
) -> list[str]:  # fmt: skip
    """Return the lines on the leading trial of a search that ended before it chose the best."""
    best = leader(brackets, trials, maximize=maximize)
    if best is not None:
        at = last_epochs(best)
        text = f"trial {best.trial}: {_words(metric)} {best.values[at]:.4f} after {_epochs(at)}"
        return [fact("best so far", text)]
    failed = sum(trial.state is TrialState.FAILED for trial in trials)
    if not failed:
        return [fact("best", "none: nothing was measured yet")]
    others = "" if failed == len(trials) else ", and no other was measured yet"
    return [fact("best", f"none: {failed} of {len(trials)} trials failed{others}")]


def best_lines(metric: str, max_epochs: float, best: BestTrial) -> list[str]:
    """Return the lines on the best trial of a search that goes up to `max_epochs`."""
    lines = [fact("best", f"trial {best.trial}: {_words(metric)} {best.value:.4f} after {_epochs(best.epochs)}")]
    if best.test_accuracy is not None:
        lines.append(fact("test accuracy", f"{best.test_accuracy:.4f}"))
    elif best.test_loss is not None:
        lines.append(fact("test loss", f"{best.test_loss:.4f}"))
    params = [f"{key}={as_text(value)}" for key, value in best.params.items()]
    lines += [fact("" if n else "parameters", text) for n, text in enumerate(params)]
    lines.append(fact("model", best.model_path or "its files are not in this folder"))
    lines.append(fact("to train it", best.command))
    if best.epochs < max_epochs:
        lines.append(fact("", f"as far as it came here; without max_rounds to its end, {_epochs(max_epochs)}"))
    return lines


def _times(summary: SearchSummary) -> str:
    wall_s = summary.wall_time_s
    parts = {
        "loading": summary.loading_time_s,
        "training": summary.train_time_s,
        "measuring": summary.evaluation_time_s,
        "finding out how to pack": summary.tuning_time_s,
        "waiting for other workers": summary.waiting_time_s,
    }
    share = summary.overhead_time_s / wall_s if wall_s else 0.0
    spent = [f"{seconds:.1f} s {what}" for what, seconds in parts.items() if seconds or what == "training"]
    spent.append(f"{summary.overhead_time_s:.1f} s overhead ({share:.1%})")
    return f"{wall_s:.1f} s: {', '.join(spent)}"


def _epochs(number: float) -> str:
    return f"{number:.4g} epoch{'' if number == 1 else 's'}"


def _words(metric: str) -> str:
    return metric.replace("_", " ")


@dataclass(frozen=True)
class Row:
    """A trial in the table; `running` where it trains here."""

    trial: int
    record: TrialRecord | None
    running: RunningTrial | None = None


def live_table(
    info: SearchInfo,
    trials: Sequence[TrialRecord],
    progress: SearchProgress,
    line: RenderableType,
    size: tuple[int, int],
) -> Group:
    """Return the table, the number of trials in each state, and `line` under it, in at most `size`: columns and lines.

    What runs comes first, then the best of the others; a `*` marks the best of all.
    """
    rows, hidden = choose_rows(trials, progress.running, size[1] - _LINES_AROUND, maximize=info.maximize)
    names = short_names([parameter.key for parameter in info.space.parameters])
    columns: list[tuple[str, int, JustifyMethod]] = [("trial", _TRIAL_WIDTH, "right")]
    columns += [("bracket", _BRACKET_WIDTH, "right")] if info.num_brackets > 1 else []
    value = info.metric.removeprefix("validation_")
    columns += [("epochs", _EPOCHS_WIDTH, "right"), ("state", _STATE_WIDTH, "left"), (value, _VALUE_WIDTH, "right")]
    shown = _fitting(names, rows, size[0] - sum(width + _PADDING for _, width, _ in columns))
    columns += [(_two_lines(names[key]), width, "right") for key, width in shown.items()]
    table = Table(box=None, padding=(0, _PADDING, 0, 0), pad_edge=False)
    for head, width, justify in columns:
        table.add_column(head, justify=justify, vertical="bottom", width=width, no_wrap=True, header_style="dim")
    for row in rows:
        is_best = row.trial == progress.best_trial
        table.add_row(*_cells(info, row, list(shown), is_best=is_best), style="bold" if is_best else None)
    left_out = [name for key, name in names.items() if key not in shown]
    below = counts_line(trials, progress.running, info.num_trials, hidden)
    below += f" · not shown: {', '.join(left_out)}" if left_out else ""
    return Group(table, Text(below, style="dim", no_wrap=True, overflow="ellipsis"), line)


def _two_lines(name: str) -> str:
    return name.replace("_", "\n", 1)


def choose_rows(
    trials: Sequence[TrialRecord], running: Sequence[RunningTrial], room: int, *, maximize: bool
) -> tuple[list[Row], int]:
    """Return the rows that fit, running trials before the best of the others, and the number of those left out."""
    room = max(room, _FEWEST_ROWS)
    records = {record.trial: record for record in trials}
    here = {each.trial: each for each in sorted(running, key=lambda each: each.trial)}
    best = [record for record in ranked(trials, maximize=maximize) if record.trial not in here]
    num_best = min(len(best), _MOST_BEST, max(room - len(here), round(room * (1 - _RUNNING_SHARE))))
    first = [Row(trial, records.get(trial), each) for trial, each in here.items()][: room - num_best]
    return first + [Row(record.trial, record) for record in best[:num_best]], len(here) - len(first)


def counts_line(
    trials: Sequence[TrialRecord], running: Sequence[RunningTrial], num_trials: int, hidden: int = 0
) -> str:
    """Return the number of trials in each state; those that run elsewhere are waiting or promoted."""
    here = {each.trial for each in running}
    counts = Counter(record.state for record in trials if record.trial not in here)
    counts[TrialState.WAITING] += num_trials - len(here | {record.trial for record in trials})
    parts = [f"{len(here)} running" + (f" ({hidden} not shown)" if hidden else "")] if here else []
    parts += [f"{counts[state]} {state}" for state in TrialState if counts[state]]
    return f"{num_trials} trials: {', '.join(parts)}"


def _fitting(names: Mapping[str, str], rows: Sequence[Row], room: int) -> dict[str, int]:
    """Return the first parameters that have room, with the widths of their columns."""
    found: dict[str, int] = {}
    for key, name in names.items():
        width = max(len(text) for text in (*_two_lines(name).split("\n"), *(_parameter(row, key) for row in rows)))
        room -= width + _PADDING
        if room < 0:
            break
        found[key] = width
    return found


def _cells(info: SearchInfo, row: Row, keys: Sequence[str], *, is_best: bool) -> list[RenderableType]:
    bracket = bracket_of(info.brackets, row.trial)
    value = "" if row.record is None or row.record.value is None else f"{row.record.value:.4f}"
    epochs = f"{0.0 if row.record is None else last_epochs(row.record):.3g}"
    if row.running is not None:  # and those it trains to
        epochs += f" > {bracket.epochs[row.running.rung]:.3g}"
    return [
        f"{_MARK} {row.trial}" if is_best else str(row.trial),
        *([str(bracket.index)] if info.num_brackets > 1 else []),
        epochs,
        _state(row),
        value,
        *(_parameter(row, key) for key in keys),
    ]


def _state(row: Row) -> RenderableType:
    if row.running is None:
        return "" if row.record is None else str(row.record.state)
    done = round(_BAR * row.running.progress)
    bar = Text("━" * done, style="green")
    return bar.append("─" * (_BAR - done), style="dim").append(f" {row.running.progress:4.0%}", style="none")


def _parameter(row: Row, key: str) -> str:
    params = row.record.params if row.record is not None else None
    return as_text(params[key]) if params and key in params else "–"
