"""What is said on a terminal, without one, and in console.log."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from crossbow_py import SMA, Independent
from crossbow_py.averaging import LocalSGD
from crossbow_py.telemetry.console import (
    ConsoleListener,
    epoch_line,
    final_lines,
    folder_lines,
    header_lines,
    progress_line,
)
from crossbow_py.telemetry.events import LearningStatistics
from crossbow_py.telemetry.rank_pace import RankPace, spread_of
from crossbow_py.train.run_folder.reporter import averaging_settings


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def _play(console: ConsoleListener, events: Any) -> None:
    console.on_start(events.run_info(output_dir="runs/x"))
    console.on_progress(events.progress(500))
    console.on_epoch(events.epoch_record(1))
    console.on_message("learner 1 was reseeded")
    console.on_end(events.summary())
    console.close()


def test_plain_run_has_no_control_codes_and_is_also_in_the_log(tmp_path: Path, events: Any) -> None:
    stream = io.StringIO()
    _play(ConsoleListener(tmp_path / "console.log", stream), events)
    said = stream.getvalue()
    assert "\x1b" not in said
    assert "\r" not in said
    assert said == (tmp_path / "console.log").read_text()
    for fact in (
        "84,762 parameters",
        "2 learners",
        "writing to runs/x",
        "learner 1 was reseeded",
        "finished: max_epochs",
    ):
        assert fact in said


def test_metrics_of_many_values_are_left_to_the_records(events: Any) -> None:
    metrics = {"perplexity": 12.345, **{f"f1/{digit}": 0.5 for digit in range(5)}}
    assert " · perplexity 12.35 · 250 images/s" in epoch_line(events.epoch_record(1, metrics=metrics), "4")


def test_final_block_says_accuracy_time_throughput_and_where_the_files_are(tmp_path: Path, events: Any) -> None:
    stream = io.StringIO()
    folder = tmp_path / "my runs"
    (folder / "tensorboard").mkdir(parents=True)
    summary = events.summary(time_to_accuracy_s=12.0, output_dir=str(folder))
    ConsoleListener(stream=stream).on_end(summary)
    said = stream.getvalue()
    for fact in ("0.7500 (best 0.8000)", "16.0 s training, 17.5 s in all", "250 images/s", "12.0 s of training"):
        assert fact in said
    assert "runs/x/model.safetensors" in said
    assert f"tensorboard --logdir_spec 'my runs:{folder}/tensorboard'\n" in said  # for a shell


@pytest.mark.parametrize(("name", "served"), [("my run", "--logdir_spec 'my run:{}'"), ("seed=1,k=2", "--logdir {}")])
def test_curves_are_served_under_the_name_of_the_run_where_it_can_be_written(
    tmp_path: Path, name: str, served: str
) -> None:
    folder = tmp_path / name / "tensorboard"
    folder.mkdir(parents=True)
    assert folder_lines("run folder", str(tmp_path / name), is_run=True)[1].endswith(
        f"tensorboard {served.format(folder)}"
    )


@pytest.mark.parametrize("written", [True, False])
def test_final_block_names_the_timeline_where_one_was_written(tmp_path: Path, events: Any, written: bool) -> None:
    stream, path = io.StringIO(), tmp_path / "trace.json"
    console = ConsoleListener(stream=stream)
    console.on_start(events.run_info(trace_path=str(path)))
    if written:
        path.touch()
    console.on_end(events.summary())
    assert (f"  timeline       {path} (open it in ui.perfetto.dev)" in stream.getvalue()) == written


@pytest.mark.parametrize(
    ("checkpoint", "status", "said"),
    [(True, "interrupted", True), (True, "terminated", True), (True, "finished", False), (False, "interrupted", False)],
)
def test_final_block_says_how_to_go_on_after_a_signal_where_there_is_a_checkpoint(
    events: Any, checkpoint: bool, status: str, said: bool
) -> None:
    stream = io.StringIO()
    console = ConsoleListener(stream=stream)
    console.on_start(events.run_info())
    if checkpoint:
        console.on_checkpoint("runs/x/checkpoints/samples-10", 10)
    console.on_end(events.summary(status=status))
    assert ("  to go on       the same command with resume=auto" in stream.getvalue()) == said


def test_header_says_how_the_rule_differs_from_its_defaults_and_what_it_makes_of_the_rate(events: Any) -> None:
    for rule, first, said in (
        (SMA(), None, "sma (rate × √K) · executor"),
        (SMA(), 4, "sma (rate × √4 at first) · executor"),
        (SMA(), 1, "sma · executor"),
        (SMA(rate_scaling="none", correction_rate=0.5), 4, "sma (rate_scaling=none, correction_rate=0.5) ·"),
        (LocalSGD(averaging_period=4, average_ema=1.0), None, "local_sgd (averaging_period=4) (evaluated: EMA over 1"),
        (Independent(), None, "independent · executor"),
    ):
        words = averaging_settings(rule, first)
        info = events.run_info(averaging=rule.NAME, averaging_settings=words, average_ema=rule.average_ema)
        assert f"averaging {said}" in header_lines(info)[1]


def test_what_was_measured_of_learning_is_a_line_of_its_own(events: Any) -> None:
    stream = io.StringIO()
    learning = LearningStatistics(
        gradient_noise_scale_samples=3000.4, gradient_variance=1.0, squared_gradient_norm=1.0, agreement=None,
        sharpness=3.75, measuring_s=1.25,
    )  # fmt: skip
    ConsoleListener(stream=stream).on_epoch(events.epoch_record(1, learning=learning, train_loss=3.6e23))
    epoch, line = stream.getvalue().splitlines()
    assert line == "  learning: gradient noise scale 3,000 samples · sharpness 3.75 · measured in 1.2 s"
    assert "train loss 3.6e+23" in epoch


def test_plain_progress_is_one_line_in_ten_seconds_and_every_epoch(events: Any) -> None:
    now = [0.0]
    stream = io.StringIO()
    console = ConsoleListener(stream=stream, clock=lambda: now[0])
    console.on_start(events.run_info())
    header = len(stream.getvalue().splitlines())
    for second in range(25):
        now[0] = float(second)
        console.on_progress(events.progress(second * 100, remaining_s=9.0))
        console.on_epoch(events.epoch_record(second))
    lines = stream.getvalue().splitlines()[header:]
    assert sum("left" in line for line in lines) == 2
    assert sum("test accuracy" in line for line in lines) == 25


def test_terminal_run_redraws_a_bar_and_shows_the_cursor_again(tmp_path: Path, events: Any) -> None:
    stream = Terminal()
    _play(ConsoleListener(tmp_path / "console.log", stream), events)
    said = stream.getvalue()
    assert "epoch 0.50/4" in said
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")
    log = (tmp_path / "console.log").read_text()
    assert "\x1b" not in log
    assert "epoch 1/4" in log


def test_terminal_that_goes_away_does_not_stop_the_run(tmp_path: Path, events: Any) -> None:
    _play(ConsoleListener(tmp_path / "console.log", ClosedPipe()), events)
    assert "finished: max_epochs" in (tmp_path / "console.log").read_text()


def test_progress_line_with_and_without_a_planned_end(events: Any) -> None:
    planned = progress_line(events.progress(1500, remaining_s=10.0), "4")
    assert planned == "epoch 1.50/4 · loss 0.5000 · 250 images/s · 0:10 left · lr 0.1 · 2 learners · 1,500 samples"
    assert "left" not in progress_line(events.progress(1500), "–")


def test_epoch_line_of_independent_learners_names_each(events: Any) -> None:
    assert "learners 0.5000 0.7500" in epoch_line(events.epoch_record(1, learner_accuracy=(0.5, 0.75)), "4")


def _paces(slowest_ms: float) -> tuple[RankPace, ...]:
    steps = [100.0, 100.0, 80.0, slowest_ms]
    return tuple(RankPace(rank, "gpu-7", step, 320.0, None, None, 0.125) for rank, step in enumerate(steps))


@pytest.mark.parametrize(("slowest_ms", "said"), [(104.0, ""), (112.0, " · slowest rank 3 on gpu-7 (+12%)")])
def test_slowest_rank_is_named_when_it_is_much_slower_than_the_others(
    events: Any, slowest_ms: float, said: str
) -> None:
    paces = _paces(slowest_ms)
    for line in (
        progress_line(events.progress(500, ranks=paces), "4"),
        epoch_line(events.epoch_record(1, ranks=spread_of(paces)), "4"),
    ):
        assert f"250 images/s{said} · lr 0.1 · " in line


def test_final_block_says_how_far_ranks_are_apart(events: Any) -> None:
    paces = _paces(104.0)
    said = "4, 80 to 104 ms a round, slowest rank 3 on gpu-7 (+4%); 12.5% of training spent waiting for other ranks"
    assert f"  ranks          {said}" in final_lines(events.summary(ranks=spread_of(paces), per_rank=paces))
    assert "ranks" not in "\n".join(final_lines(events.summary()))


def test_end_after_a_signal_between_evaluations_has_the_best_accuracy_there_was(events: Any) -> None:
    lines = final_lines(events.summary(test_accuracy=None, best_test_accuracy=0.75))
    assert "  test accuracy  0.7500 at best; the last model was not measured" in lines
