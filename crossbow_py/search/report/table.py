"""The live table of a search: the trials that run here and the best ones, on one screen. Values in, a picture out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from crossbow_py.search.events import RunningTrial, SearchInfo, SearchProgress, TrialRecord
from crossbow_py.search.hyperband import TrialState, bracket_of
from crossbow_py.search.report.standing import as_text, last_epochs, ranked, short_names

_LINES_AROUND = 5  # two of the table's head, the counts, the progress line, and the cursor's
_FEWEST_ROWS = 2
_MOST_BEST = 10
_RUNNING_SHARE = 2 / 3  # of the rows, when there are more trials than rows
_BAR = 8
_PADDING = 2
_STATE_WIDTH = _BAR + 5
_TRIAL_WIDTH, _BRACKET_WIDTH, _EPOCHS_WIDTH, _VALUE_WIDTH = 6, 7, 9, 8
_MARK = "*"


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
    """The table, how many trials are in which state, and `line` under it, in at most `size`: columns and lines.

    What runs comes first, then the best of the others; a `*` marks the best of all.
    """
    rows, hidden = choose_rows(trials, progress.running, size[1] - _LINES_AROUND, maximize=info.maximize)
    names = short_names([parameter.key for parameter in info.space.parameters])
    shown = _fitting(names, rows, size[0] - _fixed_width(info))
    table = _new_table(info, {names[key]: width for key, width in shown.items()})
    for row in rows:
        is_best = row.trial == progress.best_trial
        table.add_row(*_cells(info, row, list(shown), is_best=is_best), style="bold" if is_best else None)
    left_out = [name for key, name in names.items() if key not in shown]
    below = counts_line(trials, progress.running, info.num_trials, hidden)
    below += f" · not shown: {', '.join(left_out)}" if left_out else ""
    return Group(table, Text(below, style="dim", no_wrap=True, overflow="ellipsis"), line)


def _new_table(info: SearchInfo, parameters: Mapping[str, int]) -> Table:
    table = Table(box=None, padding=(0, _PADDING, 0, 0), pad_edge=False)
    value = info.metric.rsplit("_", maxsplit=1)[-1]
    columns: list[tuple[str, int, JustifyMethod]] = [("trial", _TRIAL_WIDTH, "right")]
    columns += [("bracket", _BRACKET_WIDTH, "right")] if info.num_brackets > 1 else []
    columns += [("epochs", _EPOCHS_WIDTH, "right"), ("state", _STATE_WIDTH, "left"), (value, _VALUE_WIDTH, "right")]
    columns += [(_two_lines(name), width, "right") for name, width in parameters.items()]
    for head, width, justify in columns:
        table.add_column(head, justify=justify, vertical="bottom", width=width, no_wrap=True, header_style="dim")
    return table


def _two_lines(name: str) -> str:
    return name.replace("_", "\n", 1)


def choose_rows(
    trials: Sequence[TrialRecord], running: Sequence[RunningTrial], room: int, *, maximize: bool
) -> tuple[list[Row], int]:
    """The rows that fit, those that run before the best of the others; and how many that run are left out."""
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
    """How many trials are in which state; those that run elsewhere are waiting or promoted."""
    here = {each.trial for each in running}
    counts = Counter(record.state for record in trials if record.trial not in here)
    counts[TrialState.WAITING] += num_trials - len(here | {record.trial for record in trials})
    parts = [f"{len(here)} running" + (f" ({hidden} not shown)" if hidden else "")] if here else []
    parts += [f"{counts[state]} {state}" for state in TrialState if counts[state]]
    return f"{num_trials} trials: {', '.join(parts)}"


def _fixed_width(info: SearchInfo) -> int:
    widths = [_TRIAL_WIDTH, _EPOCHS_WIDTH, _STATE_WIDTH, _VALUE_WIDTH]
    widths += [_BRACKET_WIDTH] if info.num_brackets > 1 else []
    return sum(widths) + _PADDING * len(widths)


def _fitting(names: Mapping[str, str], rows: Sequence[Row], room: int) -> dict[str, int]:
    """The first parameters that find room, with the widths of their columns."""
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
    return [
        f"{_MARK} {row.trial}" if is_best else str(row.trial),
        *([str(bracket.index)] if info.num_brackets > 1 else []),
        _epochs(row, bracket.epochs),
        _state(row),
        value,
        *(_parameter(row, key) for key in keys),
    ]


def _epochs(row: Row, rungs: Sequence[float]) -> str:
    """Where it was measured last, and where it trains to."""
    reached = 0.0 if row.record is None else last_epochs(row.record)
    return f"{reached:.3g}" if row.running is None else f"{reached:.3g} > {rungs[row.running.rung]:.3g}"


def _state(row: Row) -> RenderableType:
    if row.running is None:
        return "" if row.record is None else str(row.record.state)
    done = round(_BAR * row.running.progress)
    bar = Text("━" * done, style="green")
    return bar.append("─" * (_BAR - done), style="dim").append(f" {row.running.progress:4.0%}", style="none")


def _parameter(row: Row, key: str) -> str:
    params = row.record.params if row.record is not None else None
    return as_text(params[key]) if params and key in params else "–"
