"""Cells of a grid in processes of their own: recorded one by one, gone on with, and collected."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.telemetry.records import read_metrics
from crossbow_py.train.__main__ import main as train
from crossbow_py.train.checkpoints.checkpoint import checkpoints
from experiments.bench.results import read_result
from experiments.grids import parts, running
from experiments.grids.grid import Cell, Grid
from experiments.grids.running import main, recorded

PRETENDED = "tests.unit.experiments.pretended_run"
DIGITS = ["+experiment=digits", "model.hidden=[16]", "num_learners=2", "executor=serial", "device=cpu"]
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A grid of pretended cells by their overrides, run with options; its result is at out/any.json."""

    def start(cells: dict[str, str], *options: str, alone: bool = False) -> int:
        made = tuple(Cell(name, tuple(words.split()), program=PRETENDED) for name, words in cells.items())
        grid = Grid("any", "Any", made, seeds=(0, 1), alone=alone)
        folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "out")]
        return main(["pretended", "any", *folders, *options], lambda _: {"any": grid})

    return start


@pytest.fixture
def result(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    return lambda: read_result(tmp_path / "out" / "any.json")


def runs_of(result: dict[str, Any]) -> list[tuple[str, int, float | None]]:
    return [(one["cell"], one["seed"], one["summary"]["test_accuracy"]) for one in result["runs"]]


def test_cells_that_are_done_are_not_run_again(
    run: Run, result: Callable[[], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({"a": "accuracy=0.9", "b": "accuracy=0.8"}, "--cells", "a") == 0
    assert runs_of(result()) == [("a", 0, 0.9), ("a", 1, 0.9)]
    pids = sorted(path.read_text() for path in tmp_path.rglob("pid"))
    capsys.readouterr()
    assert run({"renamed": "accuracy=0.9", "b": "accuracy=0.8"}, "--seeds", "0") == 0
    assert "any: 1 of 2 runs are done" in capsys.readouterr().out
    assert runs_of(result()) == [("renamed", 0, 0.9), ("renamed", 1, 0.9), ("b", 0, 0.8)]
    assert set(pids) < {path.read_text() for path in tmp_path.rglob("pid")}
    assert str(tmp_path) not in json.dumps(result()["runs"])


def test_cell_with_other_overrides_is_another(run: Run, result: Callable[[], dict[str, Any]]) -> None:
    assert run({"a": "accuracy=0.9"}, "--seeds", "0") == 0
    assert run({"a": "accuracy=0.9"}, "--seeds", "0", "accuracy=0.7") == 0
    assert runs_of(result()) == [("a", 0, 0.7)]


def test_runs_of_a_results_file_are_added_to_where_that_is_asked_for(
    run: Run, result: Callable[[], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({"a": "accuracy=0.9", "b": "accuracy=0.8"}, "--seeds", "0") == 0
    shutil.rmtree(tmp_path / "runs")
    capsys.readouterr()
    assert run({"a": "accuracy=0.9", "b": "accuracy=0.7", "c": "accuracy=0.6"}, "--seeds", "0", "--add") == 0
    assert "any: 1 of 3 runs are done" in capsys.readouterr().out
    assert runs_of(result()) == [("a", 0, 0.9), ("b", 0, 0.7), ("c", 0, 0.6)]
    assert len(list(tmp_path.rglob("pid"))) == 2


def test_run_of_settings_that_have_changed_under_the_same_words_is_made_again(
    run: Run, result: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    assert run({"a": "accuracy=0.9"}, "--seeds", "0") == 0
    (record,) = tmp_path.rglob("seed-0.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "settings": "accuracy=0.5"}))
    before = next(tmp_path.rglob("pid")).read_text()
    assert run({"a": "accuracy=0.9"}, "--seeds", "0") == 0
    assert next(tmp_path.rglob("pid")).read_text() != before
    assert runs_of(result()) == [("a", 0, 0.9)]


def test_several_at_a_time_have_a_thread_each_and_no_times(
    run: Run, result: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run({"a": "accuracy=0.9", "b": "accuracy=0.8"}, "--jobs", "2", "--seeds", "0") == 0
    assert [path.read_text() for path in tmp_path.rglob("threads")] == ["1", "1"]
    assert [one["alone"] for one in result()["runs"]] == [False, False]
    assert run({"c": "accuracy=0.7"}, "--seeds", "0") == 0
    assert [one["alone"] for one in result()["runs"]] == [True]


def test_grid_whose_times_matter_refuses_several_at_a_time(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run({"a": "accuracy=0.9"}, "--jobs", "2", alone=True)
    assert ended.value.code == 2
    assert "leave --jobs out" in capsys.readouterr().err


def test_cell_that_fails_is_said_and_the_others_are_run(
    run: Run, result: Callable[[], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({"bad": "fails=true", "good": "accuracy=0.9"}, "--seeds", "0") == 1
    said = capsys.readouterr().out
    assert "bad, seed 0 ended with exit code 2: error: that cannot be." in said
    assert "1 runs failed" in said
    assert runs_of(result()) == [("good", 0, 0.9)]


def test_cell_that_diverged_is_done(run: Run, result: Callable[[], dict[str, Any]]) -> None:
    assert run({"wild": "x=1"}, "--seeds", "0") == 0
    assert [(one["status"], one["summary"]["test_accuracy"]) for one in result()["runs"]] == [("failed", None)]


def test_pattern_that_matches_nothing_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run({"a": "accuracy=0.9"}, "--cells", "z*")
    assert "no cell of any matches 'z*'" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "known"), [
    (("faults", "any"), "QUESTION must be one of averaging_rules, batch_norm, "),
    (("tuner_accuracy", "any"), "GRID must be one of digits, lenet, got 'any'."),
])  # fmt: skip
def test_question_or_grid_that_there_is_not_is_refused(
    words: tuple[str, str], known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert known in capsys.readouterr().err


def test_list_only_says_what_would_be_run(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"a": "accuracy=0.9"}, "--list") == 0
    assert capsys.readouterr().out.splitlines()[1] == f"a, seed 1: python -m {PRETENDED} accuracy=0.9 seed=1"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def terminated_soon(tmp_path: Path) -> Iterator[None]:
    """This process gets SIGTERM once a pretended cell runs."""

    def terminate() -> None:
        ends = time.monotonic() + 30
        while not list(tmp_path.rglob("threads")) and time.monotonic() < ends:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    yield
    thread.join()


@pytest.mark.usefixtures("terminated_soon")
def test_stopped_grid_stops_its_cells(run: Run, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run({"a": "waits=true accuracy=0.9"})
    assert ended.value.code == 143
    (pid,) = tmp_path.rglob("pid")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_training_in_parts_is_training_in_one_piece_with_more_evaluations(tmp_path: Path) -> None:
    outcomes = {}
    for number in (1, 2):
        folder = tmp_path / str(number)
        words = [*DIGITS, "averaging=diloco", "averaging.averaging_period=4", "max_epochs=1.5", "seed=1",
                 f"output_dir={folder}", "resume=auto"]  # fmt: skip
        assert parts.main([str(number), *words]) == 0
        outcomes[number] = read_metrics(folder / "metrics.jsonl")
    whole, pieces = outcomes[1], outcomes[2]
    assert [round(record["epoch"], 1) for record in whole] == [1.0, 1.5]
    assert [round(record["epoch"], 1) for record in pieces] == [0.5, 1.0, 1.5]
    for key in ("samples_seen", "test_loss", "test_accuracy", "train_loss"):
        assert [record[key] for record in whole] == [record[key] for record in pieces[1:]]


def test_training_in_parts_goes_on_where_it_was_stopped_and_stops_at_the_target(tmp_path: Path) -> None:
    words = [*DIGITS, f"output_dir={tmp_path / 'run'}", "resume=auto"]
    assert parts.main(["2", *words, "schedule.epochs=1", "max_epochs=0.5"]) == 0
    assert parts.main(["2", *words, "schedule.epochs=1", "max_epochs=1", "target_accuracy=0.1"]) == 0
    assert parts.epochs_done(tmp_path / "run") == pytest.approx(0.5, abs=0.05)


def test_training_in_parts_that_was_killed_behind_its_last_evaluation_is_brought_to_its_end(tmp_path: Path) -> None:
    words = [*DIGITS, f"output_dir={tmp_path / 'run'}", "resume=auto", "max_epochs=1"]
    assert parts.main(["1", *words]) == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert parts.main(["1", *words]) == 0
    assert recorded(Cell("x", tuple(DIGITS)), 0, tmp_path / "run") is not None
    ended = (tmp_path / "run" / "summary.json").stat().st_mtime_ns
    assert parts.main(["1", *words]) == 0
    assert (tmp_path / "run" / "summary.json").stat().st_mtime_ns == ended


def test_training_in_parts_that_was_killed_between_an_evaluation_and_its_checkpoint_has_all_evaluations(
    tmp_path: Path,
) -> None:
    words = [*DIGITS, f"output_dir={tmp_path / 'run'}", "resume=auto", "max_epochs=1"]
    assert parts.main(["4", *words[:-1], "max_epochs=0.75", "schedule.epochs=1"]) == 0
    newest, *_ = checkpoints(tmp_path / "run")
    shutil.rmtree(newest)
    assert parts.epochs_done(tmp_path / "run") == pytest.approx(0.5, abs=0.05)
    assert parts.main(["4", *words]) == 0
    epochs = [record["epoch"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert epochs == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.05)


def test_training_that_diverges_is_recorded_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert train([*DIGITS, "optimizer.learning_rate=1e30", f"output_dir={folder}"]) == 1
    found = recorded(Cell("x", tuple(DIGITS)), 0, folder)
    assert found is not None
    assert (found["status"], found["summary"]["test_accuracy"]) == ("failed", None)
    assert "went non-finite" in capsys.readouterr().err


def test_training_that_was_stopped_is_not_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"status": "terminated", "stop_reason": "SIGTERM"}))
    assert running.recorded(Cell("x", ()), 0, folder) is None
