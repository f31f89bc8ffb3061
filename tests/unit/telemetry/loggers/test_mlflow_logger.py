"""Runs and searches in a database of MLflow, read back with its own client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.telemetry.loggers.chosen import trackers
from crossbow_py.telemetry.loggers.mlflow_logger import MLflowLogger, MLflowTracker, _name
from crossbow_py.telemetry.loggers.tracker import Subject, TrialRun
from tests.trackers import mlflow_template

pytestmark = pytest.mark.slow  # importing MLflow alone takes seconds

mlflow = pytest.importorskip("mlflow")


@pytest.fixture
def client(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the database that is the tracking URI."""
    shutil.copy(mlflow_template(tmp_path_factory), tmp_path / "a.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/a.db")
    monkeypatch.chdir(tmp_path)  # where MLflow keeps files of runs without a place of their own
    return mlflow.MlflowClient()


def runs(client: Any, experiment: str = "digits") -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def history(client: Any, run: Any, key: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]


def record(logger: MLflowLogger, events: Any, folder: Path, epochs: range, **info: Any) -> None:
    given = {"output_dir": str(folder), "hyper_parameters": {"optimizer.momentum": 0.9, "flip": True, "n": "null"}}
    logger.on_start(events.run_info(**{**given, **info}))
    for epoch in epochs:
        logger.on_epoch(events.epoch_record(epoch, test_accuracy=0.5 + epoch / 10))
    logger.on_class_counts(ClassCounts(np.array([[3, 1, 0], [0, 2, 0]])), "test", 1000)
    (folder / "metrics.jsonl").write_text("{}\n")
    logger.on_end(events.summary(output_dir=str(folder), metrics={"f1": 0.25}))
    logger.close()


@pytest.mark.slow
def test_run_has_parameters_curves_figures_status_pictures_and_files(tmp_path: Path, events: Any, client: Any) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    record(logger := MLflowLogger(tags={"team": "a"}), events, folder, range(1, 3))
    (run,) = runs(client)
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"optimizer.momentum": "0.9", "flip": "true", "n": "null"}
    assert history(client, run, "accuracy/test") == [(1000, 0.6), (2000, 0.7)]
    assert history(client, run, "epoch") == [(1000, 1.0), (2000, 2.0)]
    assert history(client, run, "summary/metrics/f1") == [(4000, 0.25)]
    tags = run.data.tags
    assert (tags["status"], tags["stop_reason"], tags["num_parameters"]) == ("finished", "max_epochs", "84762")
    assert (tags["team"], tags["experiment"]) == ("a", "digits")
    files = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert files == {"metrics.jsonl", "confusion_matrix"}
    assert [each.path for each in client.list_artifacts(run.info.run_id, "confusion_matrix")] == [
        "confusion_matrix/test.png"
    ]
    assert run.info.run_id in logger.take_notes()[0]


@pytest.mark.slow
def test_run_that_goes_on_is_the_same_run_and_a_fresh_one_another(tmp_path: Path, events: Any, client: Any) -> None:
    record(MLflowLogger(), events, tmp_path, range(1, 3))
    record(MLflowLogger(), events, tmp_path, range(2, 4), samples_seen=1000)
    (run,) = runs(client)
    assert run.info.status == "FINISHED"
    assert {step for step, _ in history(client, run, "accuracy/test")} == {1000, 2000, 3000}
    record(MLflowLogger(), events, tmp_path, range(1, 2))
    assert len(runs(client)) == 2


def test_changed_parameter_of_a_run_that_goes_on_stays_and_is_told(tmp_path: Path, events: Any, client: Any) -> None:
    record(MLflowLogger(), events, tmp_path, range(1, 2), hyper_parameters={"num_workers": 2})
    logger = MLflowLogger()
    changed = {"num_workers": 4, "seed": 0}
    record(logger, events, tmp_path, range(2, 3), samples_seen=1000, hyper_parameters=changed)
    assert "MLflow keeps the parameters that the run began with: num_workers=2." in logger.take_notes()
    (run,) = runs(client)
    assert run.data.params == {"num_workers": "2", "seed": "0"}


def test_run_that_mlflow_does_not_have_any_more_begins_anew_and_that_is_told(
    tmp_path: Path, events: Any, client: Any
) -> None:
    (tmp_path / "mlflow.json").write_text('{"run_id": "0123456789abcdef0123456789abcdef"}')
    record(logger := MLflowLogger(), events, tmp_path, range(2, 3), samples_seen=1000)
    assert logger.take_notes()[0].startswith("MLflow has no run 0123456789abcdef0123456789abcdef any more")
    assert len(runs(client)) == 1


def test_failed_and_stopped_runs_have_their_status(tmp_path: Path, events: Any, client: Any) -> None:
    for name, status in [("a", "failed"), ("b", "interrupted"), ("c", "terminated"), ("d", "target_reached")]:
        logger = MLflowLogger(run_name=name)
        logger.on_start(events.run_info())
        logger.on_end(events.summary(status=status, output_dir=None))
    assert {run.info.run_name: run.info.status for run in runs(client)} == {
        "a": "FAILED", "b": "KILLED", "c": "KILLED", "d": "FINISHED",
    }  # fmt: skip


def test_names_come_from_arguments_then_variables_then_the_run(
    events: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for experiment, variable, expected in [(None, "of_env", "of_env"), ("given", "of_env", "given")]:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", variable)
        logger = MLflowLogger(experiment)
        logger.on_start(events.run_info())
        logger.close()
        assert [run.info.status for run in runs(client, expected)] == ["FAILED"]


def test_without_a_tracking_uri_it_is_the_database_that_mlflow_itself_takes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copy(mlflow_template(tmp_path_factory), tmp_path / "mlflow.db")
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        record(MLflowLogger(), events, tmp_path / "runs" / name, range(1, 2))
    found = runs(mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db"))
    assert {run.info.run_name for run in found} == {"a", "b"}


def test_link_in_the_place_of_the_file_it_writes_is_refused(tmp_path: Path, events: Any, client: Any) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mlflow.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be written"):
        MLflowLogger().on_start(events.run_info(output_dir=str(tmp_path)))


@pytest.mark.parametrize("variables", [{}, {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}])
def test_server_that_does_not_answer_is_refused_at_the_start_and_variables_stay(
    events: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")  # the port discard, where nobody is
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with pytest.raises(UserError) as refused:
        MLflowLogger().on_start(events.run_info())
    assert str(refused.value).startswith("logger=[mlflow]: MLflow at http://127.0.0.1:9 cannot record the run (")
    assert "correct MLFLOW_TRACKING_URI, or leave mlflow out." in str(refused.value)
    assert "secret" not in str(refused.value)
    assert dict(os.environ) == before


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "./mlruns", "ftp://host", "nonsense:x"])
def test_address_that_takes_no_runs_is_refused_before_a_run_begins(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=rf"^logger=\[mlflow\]: MLflow at {address} cannot record .* correct MLFLOW_"):
        trackers(["mlflow"])


def test_database_is_not_made_before_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/new.db")
    assert len(trackers(["mlflow"])) == 1
    assert not (tmp_path / "new.db").exists()


def test_deleted_experiment_is_refused(events: Any, client: Any) -> None:
    client.delete_experiment(client.create_experiment("digits"))
    with pytest.raises(UserError, match="MLflow's experiment digits is deleted; restore it, or set"):
        MLflowLogger().on_start(events.run_info())


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("accuracy/test", "accuracy/test"),
        ("metrics/f1/Ärger 7.5-x:y_z", "metrics/f1/Ärger 7.5-x:y_z"),
        ("metrics/f1/a(b)", "metrics/f1/a_28_b_29_"),
        ("metrics/..//x", "metrics/_../_/x"),
    ],
)
def test_names_are_such_as_mlflow_takes(client: Any, events: Any, name: str, taken: str) -> None:
    assert _name(name) == taken
    logger = MLflowLogger()
    logger.on_start(events.run_info())
    logger.on_epoch(events.epoch_record(1, metrics={name.removeprefix("metrics/"): 0.5}))
    logger.on_end(events.summary(output_dir=None))
    key = taken if name.startswith("metrics/") else f"metrics/{taken}"
    assert history(client, runs(client)[0], key) == [(1000, 0.5)]


def test_trials_are_nested_once_whichever_worker_ends_first(tmp_path: Path, client: Any) -> None:
    subject = Subject("search", tmp_path, {}, {}, continues=True)
    trials = [
        TrialRun(0, {"lr": 0.1}, {100: 0.5, 200: 0.75}, failed=False),
        TrialRun(1, {"lr": 0.2}, {}, failed=True),
    ]
    for known in (trials[:1], trials):
        worker = MLflowTracker()
        worker.open(subject)
        worker.trials(known, "search/accuracy")
        worker.end("finished", 300, {"best/value": 0.75}, {"status": "finished"})
    by_name = {run.info.run_name: run for run in runs(client, "search")}
    assert by_name.keys() == {tmp_path.name, "trial_00000", "trial_00001"}
    parent, first, second = by_name[tmp_path.name], by_name["trial_00000"], by_name["trial_00001"]
    assert first.data.tags["mlflow.parentRunId"] == second.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert history(client, first, "search/accuracy") == [(100, 0.5), (200, 0.75)]
    assert (first.data.params, first.info.status) == ({"lr": "0.1"}, "FINISHED")
    assert (second.data.params, second.info.status) == ({"lr": "0.2"}, "FAILED")
    assert parent.data.metrics["best/value"] == 0.75


@pytest.mark.parametrize("call", ["log_batch", "set_terminated"])
def test_trial_that_was_left_midway_is_completed_by_the_next_try_and_there_once(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("gone")

    tracker, trials = MLflowTracker(), [TrialRun(0, {"lr": 0.1}, {100: 0.5, 200: 0.75}, failed=False)]
    tracker.open(Subject("search", tmp_path, {}, {}, continues=True))
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, call, refuse)
        with pytest.raises(ConnectionError):
            tracker.trials(trials, "search/accuracy")
    tracker.trials(trials, "search/accuracy")
    (trial,) = [run for run in runs(client, "search") if run.info.run_name == "trial_00000"]
    assert (trial.data.params, trial.info.status) == ({"lr": "0.1"}, "FINISHED")
    assert history(client, trial, "search/accuracy") == [(100, 0.5), (200, 0.75)]


def test_worker_that_leaves_while_others_go_on_leaves_the_run_running(tmp_path: Path, client: Any) -> None:
    for status, expected in [("running", "RUNNING"), ("finished", "FINISHED")]:
        worker = MLflowTracker()
        worker.open(Subject("search", tmp_path, {}, {}, continues=True))
        worker.end(status, 300, {}, {"status": status})
        (run,) = runs(client, "search")
        assert (run.info.status, run.data.tags["status"]) == (expected, status)
        assert (run.info.end_time is None) == (status == "running")


@pytest.mark.long
@pytest.mark.slow
def test_processes_that_start_at_once_without_a_database_are_all_recorded(tmp_path: Path) -> None:
    begin = (
        "from crossbow_py.telemetry.loggers.mlflow_logger import MLflowTracker\n"
        "from crossbow_py.telemetry.loggers.tracker import Subject\n"
        "import mlflow.store.tracking.sqlalchemy_store, sys\n"
        "print('ready', flush=True), sys.stdin.readline()\n"
        "tracker = MLflowTracker()\n"
        "tracker.open(Subject('digits', None, {}, {}, continues=False))\n"
        "tracker.end('finished', 0, {'x': 1.0}, {})\n"
    )
    others = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    given = {**others, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", begin], cwd=tmp_path, env=given, text=True, stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for _ in range(3)
        ]  # fmt: skip
        for each in processes:
            assert each.stdout is not None and each.stdout.readline() == "ready\n"
        for each in processes:
            assert each.stdin is not None
            each.stdin.close()  # at once
        assert [each.wait() for each in processes] == [0, 0, 0]
    found = runs(mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db"))
    assert [run.info.status for run in found] == ["FINISHED"] * 3


def test_database_that_is_gone_in_the_middle_is_told_and_the_rest_arrives_when_it_is_back(
    tmp_path: Path, events: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = MLflowLogger()
    logger.on_start(events.run_info())
    logger.take_notes()
    with monkeypatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> None:
            raise mlflow.exceptions.MlflowException("the database is locked")

        patch.setattr(mlflow.MlflowClient, "log_batch", refuse)
        logger.on_epoch(events.epoch_record(1))
        assert logger._courier is not None
        logger._courier._deliver()
        (said,) = logger.take_notes()
        assert said.startswith("MLflow did not take points (MlflowException: the database is locked); training goes on")
    logger.on_epoch(events.epoch_record(2))
    logger.on_end(events.summary(output_dir=None))
    assert logger.take_notes() == []
    (run,) = runs(client)
    assert history(client, run, "accuracy/test") == [(1000, 0.75), (2000, 0.75)]


@pytest.mark.slow
def test_database_that_cannot_be_opened_is_given_up_within_seconds(events: Any) -> None:
    tries, begun_s = mlflow.store.db.utils.MAX_RETRY_COUNT, time.monotonic()
    with pytest.raises(UserError, match="unable to open database file.; start it, correct MLFLOW_TRACKING_URI, or"):
        MLflowLogger(tracking_uri="sqlite:////proc/d.db").on_start(events.run_info())
    assert time.monotonic() - begun_s < 20
    assert tries == mlflow.store.db.utils.MAX_RETRY_COUNT
