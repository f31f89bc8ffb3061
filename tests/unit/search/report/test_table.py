"""The live table, drawn on consoles of fixed size."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from crossbow_py.search.events import RunningTrial
from crossbow_py.search.hyperband import TrialState
from crossbow_py.search.report.table import choose_rows, counts_line, live_table


def _drawn(
    searched: Any, trials: Any, *running: RunningTrial, size: tuple[int, int] = (100, 24), **info: Any
) -> list[str]:
    console = Console(file=io.StringIO(), width=size[0], height=size[1])
    console.print(live_table(searched.info(**info), trials, searched.progress(*running), Text("3 of 7 segments"), size))
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_table_shows_running_trials_first_and_marks_the_best(searched: Any) -> None:
    trials = (searched.trial(0), searched.trial(1, values={1.0: 0.75}, value=0.75, state=TrialState.PAUSED),
              searched.waiting(2), searched.waiting(3))  # fmt: skip
    assert _drawn(searched, trials, RunningTrial(2, 0, 0.5, 0)) == [
        "                                                       learning",
        " trial     epochs  state          accuracy  optimizer      rate  momentum",
        "     2      0 > 1  ━━━━────  50%                adamw       0.1         –",
        "   * 1          1  paused           0.7500        sgd      0.01       0.9",
        "     0          1  pruned           0.5000        sgd     0.001         0",
        "4 trials: 1 running, 1 waiting, 1 paused, 1 pruned",
        "3 of 7 segments",
    ]


def test_table_of_several_brackets_names_them(searched: Any) -> None:
    lines = _drawn(searched, (searched.trial(0),), num_brackets=2)
    assert lines[1].split()[:3] == ["trial", "bracket", "epochs"]
    assert lines[2].split()[:3] == ["0", "0", "1"]


@pytest.mark.parametrize("size", [(80, 24), (60, 12), (40, 10)])
def test_table_keeps_to_the_screen_and_names_what_it_left_out(searched: Any, size: tuple[int, int]) -> None:
    trials = tuple(searched.trial(number) for number in range(4))
    running = [RunningTrial(number, 0, 0.5, 0) for number in range(4)]
    lines = _drawn(searched, trials, *running, size=size)
    assert len(lines) < size[1]
    assert max(len(line) for line in lines) <= size[0]
    names = {"optimizer": 60, "momentum": 80}
    shown = " ".join(lines[:2])
    assert {name: name in shown for name in names} == {name: size[0] >= least for name, least in names.items()}


def test_rows_that_do_not_fit_are_counted_and_some_are_kept_for_the_best(searched: Any) -> None:
    running = [RunningTrial(number, 0, 0.5, 0) for number in range(20, 50)]
    rows, hidden = choose_rows(searched.trials(), running, 9, maximize=True)
    # a third of 9 rows for the best
    assert [row.trial for row in rows] == [20, 21, 22, 23, 24, 25, 1, 2, 0]
    assert hidden == 24


def test_rows_of_the_best_are_ten_at_most(searched: Any) -> None:
    trials = [searched.trial(0, values={1.0: 0.5}) for _ in range(30)]
    assert len(choose_rows(trials, [], 40, maximize=True)[0]) == 10


def test_counts_of_trials_that_nobody_has_told_of_are_waiting(searched: Any) -> None:
    running = [RunningTrial(1, 0, 0.1, 0)]
    assert counts_line([searched.trial(0)], running, 9) == "9 trials: 1 running, 7 waiting, 1 pruned"
    assert counts_line((), running, 2, 3) == "2 trials: 1 running (3 not shown), 1 waiting"
