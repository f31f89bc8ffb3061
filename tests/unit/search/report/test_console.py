"""What is said of a search on a terminal, without one, and in console.log."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from crossbow_py.search.events import RunningTrial
from crossbow_py.search.hyperband import TrialState
from crossbow_py.search.report.console import (
    SearchConsole,
    choose_rows,
    final_lines,
    live_table,
    progress_line,
)
from crossbow_py.telemetry.screen import Screen


def _plain(now: list[float]) -> tuple[SearchConsole, io.StringIO]:
    stream = io.StringIO()
    return SearchConsole(screen=Screen(stream=stream), clock=lambda: now[0]), stream


def _live(log: Path, width: int = 100, height: int = 24) -> tuple[SearchConsole, io.StringIO]:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=width, height=height)
    return SearchConsole(screen=Screen(log, stream, terminal)), stream


def test_plain_search_has_a_line_for_each_new_value_and_each_message(searched: Any) -> None:
    console, stream = _plain([0.0])
    console.on_start(searched.info())
    header = len(stream.getvalue().splitlines())
    console.on_trials((searched.trial(0), searched.waiting(1)))
    console.on_message("Trial 3 failed: no such layer.")
    console.on_trials((searched.trial(0), searched.trial(1, values={1.0: 0.75})))
    console.on_trials((searched.trial(0), searched.trial(1, values={1.0: 0.75, 2.0: 0.8})))
    console.close()
    assert stream.getvalue().splitlines()[header:] == [
        "trial 0 at 1 epoch: validation accuracy 0.5000 (best so far at this rung) · optimizer sgd · "
        "learning_rate 0.001 · momentum 0",
        "Trial 3 failed: no such layer.",
        "trial 1 at 1 epoch: validation accuracy 0.7500 (best so far at this rung) · optimizer sgd · "
        "learning_rate 0.01 · momentum 0.9",
        "trial 1 at 2 epochs: validation accuracy 0.8000 (best so far at this rung) · optimizer sgd · "
        "learning_rate 0.01 · momentum 0.9",
    ]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_plain_search_leaves_lines_of_other_workers_to_them(searched: Any) -> None:
    console, stream = _plain([0.0])
    console.on_start(searched.info())
    console.on_trials((searched.trial(0, worker="host:2"), searched.trial(2, values={1.0: 0.625})))
    assert [line.split(":")[0] for line in stream.getvalue().splitlines() if " at 1 epoch" in line] == [
        "trial 2 at 1 epoch"
    ]


def test_plain_search_that_goes_on_does_not_repeat_what_was_before(searched: Any) -> None:
    console, stream = _plain([0.0])
    console.on_start(searched.info(num_finished_segments=1))
    console.on_trials((searched.trial(0), searched.waiting(2)))
    console.on_trials((searched.trial(0), searched.trial(2, values={1.0: 0.625})))
    said = stream.getvalue()
    assert "going on: 1 of 7 rungs are done" in said
    assert "trial 0 at" not in said
    assert "trial 2 at 1 epoch" in said


def test_plain_search_says_where_it_stands_after_half_a_minute_of_silence(searched: Any) -> None:
    now = [0.0]
    console, stream = _plain(now)
    console.on_start(searched.info())
    header = len(stream.getvalue().splitlines())
    for second in range(1, 75):
        now[0] = float(second)
        console.on_progress(searched.progress(RunningTrial(0, 0, 0.5, 0)))
    lines = stream.getvalue().splitlines()[header:]
    # half an epoch of 8 in 30 and in 60 seconds
    assert [line.split(" · ")[2] for line in lines] == ["about 7:30 left", "about 15:00 left"]


def test_remaining_time_of_a_search_that_goes_on_counts_only_what_it_trained_itself(searched: Any) -> None:
    now = [10.0]
    console, stream = _plain(now)
    console.on_start(searched.info(num_finished_segments=3))
    console.on_trials((searched.trial(1), searched.waiting(0), searched.waiting(2), searched.waiting(3)))
    now[0] = 50.0
    console.on_progress(searched.progress(RunningTrial(0, 0, 1.0, 0), RunningTrial(2, 0, 1.0, 0)))
    # 4 epochs were there, 2 more took 40 seconds, 2 of 8 are left
    assert "about 0:40 left" in stream.getvalue()


def test_live_search_redraws_a_table_and_gives_the_terminal_back(tmp_path: Path, searched: Any) -> None:
    console, stream = _live(tmp_path / "log")
    console.on_start(searched.info())
    console.on_trials((searched.trial(0), searched.waiting(1)))
    console.on_progress(searched.progress(RunningTrial(1, 0, 0.5, 0)))
    console.on_end(searched.summary())
    console.close()
    said = stream.getvalue()
    assert "0 > 1" in said
    assert "━━━━" in said
    assert "trial 0 at 1 epoch" not in said  # the table shows it
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")
    log = (tmp_path / "log").read_text()
    assert "\x1b" not in log
    assert "trial 0 at 1 epoch: validation accuracy 0.5000" in log
    assert "0.8500" in log


def test_live_search_with_a_wide_terminal_has_a_bar(tmp_path: Path, searched: Any) -> None:
    drawn = []
    for width in (100, 140):
        console, stream = _live(tmp_path / "log", width)
        console.on_start(searched.info())
        console.on_progress(searched.progress(elapsed_s=5.0))
        console.close()
        drawn.append("━" in stream.getvalue())
    assert drawn == [False, True]


def test_final_lines_of_a_best_that_was_stopped_short_say_how_to_train_it_to_its_end(searched: Any) -> None:
    lines = final_lines(searched.summary(best=searched.best(epochs=1.0, model_path=None), status="stopped"))
    assert "                 as far as it came here; without max_rounds to its end, 4 epochs" in lines
    assert "  model          its files are not in this folder" in lines
    assert not any("max_rounds" in line for line in final_lines(searched.summary()))


def test_progress_line_with_and_without_a_best(searched: Any) -> None:
    assert progress_line(searched.progress(), 10.0) == (
        "3 of 7 rungs · best 0.7500 by trial 1 · about 0:10 left · 1:01 so far · 250 images/s"
    )
    assert progress_line(searched.progress(best_trial=None, best_value=None), None) == (
        "3 of 7 rungs · 1:01 so far · 250 images/s"
    )


def test_final_lines_name_the_best_its_command_and_where_the_time_went(tmp_path: Path, searched: Any) -> None:
    (tmp_path / "tensorboard").mkdir()
    assert final_lines(searched.summary(info=searched.info(output_dir=str(tmp_path)))) == [
        "",
        "search_digits finished: 4 trials (2 pruned, 1 complete, 1 failed)",
        "  failed         trial 3: ValueError: no such layer",
        "  best           trial 1: validation accuracy 0.8750 after 4 epochs",
        "  test accuracy  0.8500",
        "  parameters     optimizer=sgd",
        "                 optimizer.learning_rate=0.01",
        "                 optimizer.momentum=0.9",
        "  model          runs/x/model.safetensors",
        "  to train it    python -m crossbow_py.train model=mlp seed=11",
        "  time           8.0 s: 4.0 s training, 2.0 s measuring, 1.0 s finding out how to pack, 1.0 s overhead "
        "(12.5%)",
        "  throughput     200 images/s while training",
        f"  folder         {tmp_path}",
        f"  curves         tensorboard --logdir {tmp_path}/tensorboard",
    ]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0, 1), "best so far    trial 1: validation accuracy 0.8750 after 4 epochs"),
        ((), "best           none: nothing was measured yet"),
        ((3,), "best           none: 1 of 1 trials failed"),
        ((4, 4), "best           none: nothing was measured yet"),
        ((4, 3), "best           none: 1 of 2 trials failed, and no other was measured yet"),
    ],
)
def test_final_lines_of_a_search_that_was_stopped_say_who_leads_and_how_to_go_on(
    searched: Any, numbers: tuple[int, ...], said: str
) -> None:
    trials = tuple(searched.waiting(0) if number == 4 else searched.trial(number) for number in numbers)
    text = "\n".join(final_lines(searched.summary(best=None, status="interrupted", trials=trials)))
    assert said in text
    assert "to go on       the same command" in text


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
