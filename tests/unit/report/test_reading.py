"""What a report knows of a run's folder, whatever is missing or damaged there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import locked
from crossbow_py.report.reading import RunRecord, find_runs, read_runs
from crossbow_py.telemetry.class_counts import ClassCounts
from tests.run_folders import write_run, write_trace, write_unfinished

ODD_SPANS = b'{"traceEvents": [{"ph": "X", "name": "a", "tid": 1, "ts": 0, "dur": 1, "args": []}]}'


def read(folder: Path) -> RunRecord:
    (run,) = read_runs([folder])
    return run


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "digits" / "a")
    write_trace(folder)
    run = read(folder)
    assert (run.name, run.status, list(run.notes)) == ("digits/a", "finished", [])
    assert run.by_epoch("test_accuracy") == [(1000, 0.6), (2000, 0.7), (3000, 0.8)]
    assert run.by_epoch("test_accuracy", "elapsed_s") == [(4.0, 0.6), (8.0, 0.7), (12.0, 0.8)]
    assert [decision["num_learners"] for decision in run.decisions] == [2]
    assert [samples for samples, _ in run.curves["loss/train"]] == [500, 1000, 1500, 2000, 2500, 3000]
    assert (run.config["optimizer"], run.config["averaging"], run.config["batch_size"]) == ("sgd", "sma", 16)
    assert len(run.spans) == 6 * 5
    assert (run.spans[0].task, run.spans[0].stream, run.spans[0].round_index) == ("learning", "learner 0", 0)


def test_reading_changes_nothing_and_a_lock_says_whether_the_run_goes_on(tmp_path: Path) -> None:
    folder = write_unfinished(tmp_path / "a")
    before = sorted(folder.iterdir())
    assert read(folder).status == "unfinished"
    assert sorted(folder.iterdir()) == before
    with locked(folder / ".lock", lambda: None):
        assert read(folder).status == "running"
    assert read(folder).status == "unfinished"


def test_a_folder_that_nobody_may_look_into_holds_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match="holds no run"):
        find_runs([tmp_path / "closed"])


def test_an_unfinished_run_has_what_it_has_recorded_and_a_note(tmp_path: Path) -> None:
    run = read(write_unfinished(tmp_path / "a"))
    assert run.status == "unfinished"
    assert len(run.epochs) == 3
    assert [note for note in run.notes if "summary.json" in note] == list(run.notes)


@pytest.mark.parametrize("content", [b"", b"class,0,1\n", b"\xff\xfe", b"class,0,not finite\n0,x,1\n"])
def test_damaged_matrix_is_named(tmp_path: Path, content: bytes) -> None:
    folder = write_run(tmp_path / "a", class_counts=ClassCounts(np.array([[1, 2, 3], [4, 5, 6]])))
    assert read(folder).class_counts.counts.tolist() == [[1, 2, 3], [4, 5, 6]]  # type: ignore[union-attr]
    (folder / "confusion_test.csv").write_bytes(content)
    run = read(folder)
    assert run.class_counts is None
    assert list(run.notes) == ["confusion_test.csv cannot be read"]


def test_torn_and_foreign_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"samples_seen": 4000, "test_acc\n\xff\xfe\n[1, 2]\n')
        file.write(b'{"samples_seen": 3500, "test_accuracy": "high"}\n')
    run = read(folder)
    assert run.by_epoch("test_accuracy") == [(1000, 0.6), (2000, 0.7), (3000, 0.8)]
    assert "metrics.jsonl has 3 lines that cannot be read" in run.notes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "trace.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\x00\xff\x80", b'{"traceEvents": [{}]}', b"[" * 3000, ODD_SPANS])
def test_damaged_files_are_named_and_the_rest_is_there(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_run(tmp_path / "a")
    (folder / name).write_bytes(content)
    run = read(folder)
    assert len(run.epochs) == 3
    assert not run.spans
    spans = (b'{"traceEvents": [{}]}', ODD_SPANS)
    readable = name == "config.yaml" and content in (b"", *spans)
    readable |= name == "summary.json" and content in spans
    assert [note for note in run.notes if note.startswith(name)] == ([] if readable else [f"{name} cannot be read"])


def test_damaged_event_files_leave_a_point_an_epoch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for path in (folder / "tensorboard").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3] + b"\x00" * 100)
    run = read(folder)
    assert len(run.epochs) == 3
    assert "tensorboard/ ends before metrics.jsonl does: some of it cannot be read" in run.notes
    for path in (folder / "tensorboard").iterdir():
        path.unlink()
    (folder / "tensorboard").rmdir()
    run = read(folder)
    assert not run.curves
    assert any(note.startswith("no tensorboard/") for note in run.notes)


def test_find_runs_takes_runs_and_folders_of_runs_each_once(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "digits" / "a", epochs=1), write_run(tmp_path / "digits" / "b", epochs=1)
    assert find_runs([tmp_path / "digits"]) == [a, b]
    assert find_runs([tmp_path]) == [a, b]
    assert find_runs([b, tmp_path / "digits"]) == [b, a]


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search.json").write_text("{}")
    for place, words in [("none", "does not exist"), ("empty", "holds no run"), ("file", "is a file"),
                         ("search", "of a search")]:  # fmt: skip
        with pytest.raises(UserError, match=words):
            find_runs([tmp_path / place])


def test_more_runs_than_one_can_tell_apart_are_refused(tmp_path: Path) -> None:
    for index in range(13):
        (tmp_path / f"{index}").mkdir()
        (tmp_path / f"{index}" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="at most 12 runs, got 13"):
        find_runs([tmp_path])


@pytest.mark.slow
def test_runs_that_are_called_by_the_time_have_the_names_of_what_they_differ_in(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"2026-01-02_03-04-0{seed}", f"seed={seed}", epochs=1) for seed in (1, 2)]
    assert [run.name for run in read_runs(folders)] == ["seed=1", "seed=2"]
    assert [run.name for run in read_runs([*folders, write_run(tmp_path / "b", epochs=1)])][2] == "b"
