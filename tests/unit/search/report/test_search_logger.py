"""What a tracking service is told of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossbow_py.search.report.listeners import search_listeners
from crossbow_py.search.report.search_logger import SearchLogger
from crossbow_py.telemetry.loggers.tracker import TrialRun
from tests.trackers import MemoryTracker


def test_search_has_its_best_value_by_the_samples_of_all_its_trials_figures_and_files(
    tmp_path: Path, searched: Any
) -> None:
    tracker, said = MemoryTracker(), list[str]()
    logger = SearchLogger(tracker, said.append)
    info = searched.info(output_dir=str(tmp_path))
    for name in ("search.json", "config.yaml", "learning_curves.png"):
        (tmp_path / name).touch()
    logger.on_start(info)
    logger.on_trials((searched.trial(0), searched.waiting(1)))
    logger.on_end(searched.summary(info=info))
    logger.close()
    (subject,) = tracker.of("open")
    assert (subject.experiment, subject.name, subject.continues) == ("search_digits", tmp_path.name, True)
    assert subject.parameters["sampler"] == "random"
    assert subject.parameters["space.optimizer"] == "one of 'sgd', 'adamw'"
    # A hundred samples an epoch: trial 0 saw one epoch; in the end the others four and two more.
    best = "search/best_value_by_samples_of_all_trials"
    assert [(point.samples_seen, point.values.get(best)) for point in tracker.points] == [(100, 0.5), (700, 0.875)]
    ((trials, metric),) = tracker.of("trials")
    assert metric == "search/validation_accuracy_by_samples_seen"
    assert [trial.number for trial in trials] == [0, 1, 2, 3]
    assert trials[1] == TrialRun(
        1,
        {"optimizer": "sgd", "optimizer.learning_rate": 0.01, "optimizer.momentum": 0.9},
        {100: 0.75, 200: 0.8, 400: 0.875},
        failed=False,
    )
    assert trials[3].failed
    assert tracker.of("file") == ["search.json", "learning_curves.png"]  # config.yaml may have a storage's password
    ((status, samples, figures, facts),) = tracker.of("end")
    assert (status, samples) == ("finished", 700)
    assert figures == {
        "best/trial": 1, "best/value": 0.875, "best/epochs": 4.0, "best/test_accuracy": 0.85, "best/test_loss": 0.5,
    }  # fmt: skip
    assert (facts["status"], facts["best.optimizer.momentum"]) == ("finished", 0.9)
    assert said == ["Service records this."]


def test_worker_of_a_service_that_is_not_shared_has_a_run_of_its_own(tmp_path: Path, searched: Any) -> None:
    class Apart(MemoryTracker):
        IS_SHARED = False

    tracker = Apart()
    logger = SearchLogger(tracker, print)
    logger.on_start(searched.info(output_dir=str(tmp_path)))
    logger.close()
    (subject,) = tracker.of("open")
    assert (subject.name, subject.continues) == (f"{tmp_path.name} host:1", False)
    assert [status for status, *_ in tracker.of("end")] == ["failed"]


def test_trouble_with_a_service_is_told_and_the_search_goes_on(searched: Any) -> None:
    tracker, said = MemoryTracker(), list[str]()
    logger = SearchLogger(tracker, said.append)
    logger.on_start(searched.info())
    tracker.error = RuntimeError("gone")
    logger.on_end(searched.summary(info=searched.info()))
    assert said == [
        "Service records this.", "Service did not take points, trials, how it ended (RuntimeError: gone).",
    ]  # fmt: skip


@pytest.mark.parametrize("is_shared", [True, False])
def test_worker_that_leaves_others_behind_does_not_end_the_run_that_they_share(searched: Any, is_shared: bool) -> None:
    class Kind(MemoryTracker):
        IS_SHARED = is_shared

    def recorded(num_others: int, status: str | None) -> str:
        tracker = Kind()
        logger = SearchLogger(tracker, print)
        logger.on_start(searched.info())
        logger.on_leave(num_others)
        if status is not None:
            logger.on_end(searched.summary(info=searched.info(), status=status))
        logger.close()
        ((said, _, _, facts),) = tracker.of("end")
        assert facts["status"] == said
        return str(said)

    ends = ("finished", "stopped", "interrupted", "terminated", None)
    own = ["finished", "stopped", "interrupted", "terminated", "failed"]
    assert [recorded(0, status) for status in ends] == own
    assert [recorded(1, status) for status in ends] == (["finished", *["running"] * 4] if is_shared else own)


def test_search_without_loggers_has_no_tensorboard(tmp_path: Path) -> None:
    listeners = search_listeners(tmp_path, ())
    assert [type(each).__name__ for each in listeners] == ["SearchFile", "SearchPictures", "SearchConsole"]
    for each in listeners:
        each.close()
