"""What a service is told of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.telemetry.events import LearnerCount, Predictions
from crossbow_py.telemetry.loggers.run_logger import RunLogger
from crossbow_py.telemetry.tensorboard.listeners import TensorBoardScalars
from tests.event_files import read_events
from tests.trackers import MemoryTracker

PREDICTIONS = Predictions(np.zeros((4, 8, 8, 1), np.uint8), (0, 1, 0, 1), (0, 1, 1, 1), (0.5, 0.5, 0.5, 0.5))


def test_run_is_opened_with_its_settings_and_by_the_name_of_its_folder(tmp_path: Path, events: Any) -> None:
    tracker = MemoryTracker()
    logger = RunLogger(tracker)
    logger.on_start(events.run_info(output_dir=str(tmp_path / "mine"), hyper_parameters={"optimizer.momentum": 0.9}))
    logger.close()
    (subject,) = tracker.of("open")
    assert (subject.experiment, subject.name, subject.continues) == ("digits", "mine", False)
    assert subject.parameters == {"optimizer.momentum": 0.9}
    assert (subject.facts["num_parameters"], subject.facts["planned_samples"]) == (84762, 4000)
    assert logger.take_notes() == ["Service records this."]


def test_curves_are_those_of_tensorboard_with_the_epochs(tmp_path: Path, events: Any) -> None:
    tracker = MemoryTracker()
    logger, scalars = RunLogger(tracker), TensorBoardScalars(tmp_path, None, interval_s=1.0)
    for listener in (logger, scalars):
        listener.on_start(events.run_info(num_devices=2))
        for tenth in range(4):
            listener.on_progress(events.progress(100 + tenth, elapsed_s=0.5 * tenth, efficiency=0.5))
        listener.on_epoch(events.epoch_record(1, test_loss=math.nan, metrics={"f1/a": 0.5}))
        listener.on_learner_count(LearnerCount("grow", 3, "because", 1500, 6.0))
        listener.close()
    read = read_events(tmp_path)
    own = {
        tag: [(event.step, pytest.approx(event.value)) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
        if not tag.startswith("system/")
    }
    ours: dict[str, list[tuple[int, float]]] = {}
    for point in tracker.points:
        for tag, value in point.values.items():
            ours.setdefault(tag, []).append((point.samples_seen, value))
    assert ours.pop("epoch") == [(100, 0.1), (102, 0.102), (1000, 1)]
    assert ours == own


def test_independent_learners_have_curves_by_their_numbers(events: Any) -> None:
    tracker = MemoryTracker()
    logger = RunLogger(tracker)
    logger.on_start(events.run_info())
    logger.on_epoch(events.epoch_record(1, learner_accuracy=(None, 0.75), learner_loss=(2.0, 0.25)))
    logger.close()
    found = {tag: value for point in tracker.points for tag, value in point.values.items() if "_learner_" in tag}
    assert found == {"loss/test_learner_0": 2.0, "loss/test_learner_1": 0.25, "accuracy/test_learner_1": 0.75}


def test_pictures_are_drawn_of_predictions_and_confusions(events: Any) -> None:
    tracker = MemoryTracker()
    logger = RunLogger(tracker)
    logger.on_start(events.run_info())
    logger.on_predictions(PREDICTIONS, 500)
    logger.on_class_counts(ClassCounts(np.array([[3, 1, 0], [0, 2, 0]])), "test", 1000)
    logger.close()
    assert [(name, shape[2], samples) for name, shape, samples in tracker.of("picture")] == [
        ("predictions", 3, 500), ("confusion_matrix/test", 3, 1000),
    ]  # fmt: skip


@pytest.mark.parametrize("log_model", [False, True])
def test_end_sends_figures_status_and_the_files_that_there_are(tmp_path: Path, events: Any, log_model: bool) -> None:
    tracker = MemoryTracker()
    logger = RunLogger(tracker, log_model)
    for name in ("metrics.jsonl", "summary.json", "model.safetensors"):
        (tmp_path / name).touch()
    logger.on_start(events.run_info())
    summary = events.summary(
        output_dir=str(tmp_path), metrics={"f1": 0.5}, model_sha256={"model.safetensors": "00"}, test_loss=math.nan
    )
    logger.on_end(summary)
    logger.close()
    assert tracker.of("file") == ["metrics.jsonl", "summary.json"]
    assert tracker.of("model") == (["model.safetensors"] if log_model else [])
    ((status, samples, figures, facts),) = tracker.of("end")
    assert (status, samples, facts) == ("finished", 4000, {"status": "finished", "stop_reason": "max_epochs"})
    assert figures["summary/test_accuracy"] == 0.75
    assert figures["summary/metrics/f1"] == 0.5
    assert "summary/test_loss" not in figures and "summary/time_to_accuracy_s" not in figures


def test_run_that_is_closed_before_its_end_has_failed(events: Any) -> None:
    tracker = MemoryTracker()
    logger = RunLogger(tracker)
    logger.on_start(events.run_info())
    logger.on_progress(events.progress(500))
    logger.close()
    assert [status for status, *_ in tracker.of("end")] == ["failed"]
    logger.close()
    assert len(tracker.of("end")) == 1


def test_service_that_fails_in_the_end_is_told_and_nothing_is_raised(events: Any) -> None:
    tracker = MemoryTracker()
    logger = RunLogger(tracker)
    logger.on_start(events.run_info())
    logger.take_notes()
    tracker.error = RuntimeError("gone")
    logger.on_epoch(events.epoch_record(1))
    logger.on_end(events.summary(output_dir=None))
    assert logger.take_notes() == ["Service did not take points, how it ended (RuntimeError: gone)."]
    logger.close()
