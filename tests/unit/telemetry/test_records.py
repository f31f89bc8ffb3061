"""metrics.jsonl and summary.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.telemetry.records import RunRecords, file_listeners, read_metrics, read_summary


def _epochs(path: Path) -> list[int]:
    return [line["epoch"] for line in read_metrics(path / "metrics.jsonl")]


def test_metrics_line_of_an_epoch_has_the_documented_keys_first(tmp_path: Path, events: Any) -> None:
    records = RunRecords(tmp_path, None)
    records.on_start(events.run_info())
    records.on_epoch(events.epoch_record(1))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(line)[:9] == [
        "epoch", "samples_seen", "train_loss", "test_loss", "test_accuracy", "images_per_s", "num_learners",
        "learning_rate", "elapsed_s",
    ]  # fmt: skip
    assert line["samples_seen"] == 1000
    assert line["train_accuracy"] == 0.875
    assert line["spread"] == 0.125


def test_metrics_of_a_resumed_run_lose_what_came_after_the_checkpoint_and_a_torn_line(
    tmp_path: Path, events: Any
) -> None:
    first = RunRecords(tmp_path, None)
    first.on_start(events.run_info())
    for epoch in (1, 2, 3):
        first.on_epoch(events.epoch_record(epoch))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "samples_se')
    second = RunRecords(tmp_path, 2000)
    second.on_start(events.run_info(resumed_from="checkpoint"))
    assert _epochs(tmp_path) == [1, 2]
    second.on_epoch(events.epoch_record(3))
    assert _epochs(tmp_path) == [1, 2, 3]


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path: Path, events: Any) -> None:
    records = RunRecords(tmp_path, None)
    records.on_epoch(
        events.epoch_record(1, train_loss=math.nan, test_loss=math.inf, learner_accuracy=(0.5, -math.inf))
    )
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda word: f"not JSON: {word}")
    assert line["train_loss"] is None
    assert line["test_loss"] is None
    assert line["learner_accuracy"] == [0.5, None]


def test_summary_at_the_end_has_the_documented_keys_and_the_extras(tmp_path: Path, events: Any) -> None:
    RunRecords(tmp_path, None).on_end(events.summary(versions={"torch": "2"}, learner_test_accuracy=(0.5,)))
    values = read_summary(tmp_path)
    assert set(values) >= {
        "experiment", "status", "device", "executor", "precision", "num_learners", "num_devices", "batch_size",
        "epochs", "samples_seen", "test_accuracy", "best_test_accuracy", "time_to_accuracy_s", "train_time_s",
        "wall_time_s", "images_per_s", "seed", "resumed_from", "versions",
    }  # fmt: skip
    assert (values["status"], values["learner_test_accuracy"]) == ("finished", [0.5])
    assert "extra" not in values
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_summary_of_an_earlier_end_is_gone_once_the_run_goes_on(tmp_path: Path, events: Any) -> None:
    RunRecords(tmp_path, None).on_end(events.summary(status="terminated"))
    RunRecords(tmp_path, 1000).on_start(events.run_info())
    assert read_summary(tmp_path) == {}


def test_confusion_matrices_are_files_that_a_fresh_run_removes_and_a_resumed_one_keeps(
    tmp_path: Path, events: Any
) -> None:
    records = RunRecords(tmp_path, None)
    records.on_class_counts(ClassCounts(np.array([[1, 2, 0], [0, 3, 1]]), ("cat",)), "validation", 1000)
    records.on_class_counts(ClassCounts(np.array([[1, 0, 0], [0, 1, 0]])), "test", 2000)
    files = {path.name: path.read_text() for path in tmp_path.glob("*.csv")}
    assert files == {
        "confusion_validation.csv": "class,cat,1,not finite\ncat,1,2,0\n1,0,3,1\n",
        "confusion_test.csv": "class,0,1,not finite\n0,1,0,0\n1,0,1,0\n",
    }
    RunRecords(tmp_path, 1000).on_start(events.run_info())
    assert len(list(tmp_path.glob("*.csv"))) == 2
    RunRecords(tmp_path, None).on_start(events.run_info())
    assert list(tmp_path.glob("*.csv")) == []


def test_file_listeners_through_a_run_leave_the_files_of_the_run(tmp_path: Path, events: Any) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    listeners = file_listeners(tmp_path, None)
    for listener in listeners:
        listener.on_start(events.run_info())
        listener.on_epoch(events.epoch_record(1))
        listener.on_end(events.summary())
        listener.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yaml", "metrics.jsonl", "summary.json", "tensorboard",
    ]  # fmt: skip
