"""Runs and searches from the command line in MLflow and Weights & Biases at once, and listeners of one's own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from crossbow_py import Listener
from crossbow_py.search.__main__ import main as search
from crossbow_py.telemetry.records import read_metrics, read_summary
from crossbow_py.train.__main__ import main
from tests.said import error_line
from tests.trackers import mlflow_template, wandb_history

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
DIGITS = [
    "+experiment=digits", "model.hidden=[32]", "device=cpu", "precision=fp32", "num_learners=2", "executor=serial",
]  # fmt: skip
# Tags of an epoch, and what metrics.jsonl calls them.
CURVES = {
    "loss/train": "train_loss", "loss/test": "test_loss", "accuracy/train": "train_accuracy",
    "accuracy/test": "test_accuracy", "learning_rate": "learning_rate", "averaging/spread": "spread",
    "num_learners": "num_learners", "time/training_s": "elapsed_s", "throughput/images_per_s": "images_per_s",
    "epoch": "epoch",
}  # fmt: skip


class Counting(Listener):
    """Writes how many epochs there were."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_epoch(self, record: Any) -> None:
        self.epochs += 1

    def close(self) -> None:
        Path("epochs.txt").write_text(f"{self.epochs}\n")


@pytest.fixture
def services(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both, offline. Returns a client of MLflow."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("wandb").teardown()  # which makes it read its variables again
    shutil.copy(mlflow_template(tmp_path_factory), tmp_path / "a.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/a.db")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return mlflow.MlflowClient()


def train(*arguments: str) -> int:
    return main([*DIGITS, *arguments])


def runs(client: Any, experiment: str) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def epochs_recorded(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves as metrics.jsonl has them."""
    lines = read_metrics(folder / "metrics.jsonl")
    return {tag: [(line["samples_seen"], line[name]) for line in lines] for tag, name in CURVES.items()}


@pytest.mark.slow
def test_run_in_both_services_is_what_metrics_jsonl_has_also_when_it_goes_on(services: Any) -> None:
    words = ["logger=[mlflow,wandb]", "output_dir=run"]
    assert train("max_epochs=2", *words) == 0
    assert train("max_epochs=3", "resume=auto", *words) == 0
    folder = Path("run")
    recorded = epochs_recorded(folder)
    assert len(recorded["epoch"]) == 3
    (run,) = runs(services, "digits")
    rows = wandb_history(folder / "wandb")
    steps = {step for step, _ in recorded["epoch"]}
    for tag, points in recorded.items():
        history = services.get_metric_history(run.info.run_id, tag)
        assert [(each.step, each.value) for each in history if each.step in steps] == points
        assert [
            (row["samples_seen"], row[tag]) for row in rows if tag in row and row["samples_seen"] in steps
        ] == points
    summary = read_summary(folder)
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.metrics["summary/test_accuracy"] == summary["test_accuracy"]
    assert (run.data.params["optimizer.momentum"], run.data.params["num_learners"]) == ("0.9", "2")
    assert {each.path for each in services.list_artifacts(run.info.run_id)} >= {
        "config.yaml", "metrics.jsonl", "summary.json", "console.log", "confusion_test.csv", "predictions.png",
    }  # fmt: skip
    assert not (folder / "tensorboard").exists()
    log = (folder / "console.log").read_text()
    assert f"MLflow goes on with run run ({run.info.run_id})" in log
    assert "tensorboard --logdir" not in log


def test_run_without_any_logger_has_its_own_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("max_epochs=1", "logger=[]", "output_dir=run") == 0
    assert not (Path("run") / "tensorboard").exists()
    assert len(read_metrics(Path("run/metrics.jsonl"))) == 1
    assert "curves" not in capsys.readouterr().out


@pytest.mark.slow
def test_loggers_and_listeners_may_change_when_a_run_goes_on() -> None:
    assert train("max_epochs=1", "logger=[]", "output_dir=run") == 0
    again = ["logger=[tensorboard]", f"listeners=[{__name__}.Counting]"]
    assert train("max_epochs=3", "resume=auto", "output_dir=run", *again) == 0
    assert (Path("run") / "tensorboard").is_dir()
    assert Path("epochs.txt").read_text() == "2\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["logger=nope"], ["unknown logger 'nope'"]),
        (["listeners=[nowhere.fn]"], ["listeners=nowhere.fn cannot be imported"]),
        (["listeners=[builtins.dict]"], ["listeners=builtins.dict must make a crossbow_py.Listener, got dict"]),
        (["listeners=[builtins.getattr]"], ["listeners=builtins.getattr", "failed with TypeError"]),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("output_dir=run", *arguments) == 2
    line = error_line(capsys)
    for word in words:
        assert word in line
    assert not Path("run").exists()


def test_server_that_does_not_answer_ends_the_command_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert train("max_epochs=1", "logger=[tensorboard,mlflow]", "output_dir=run") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: logger=\[mlflow\]: MLflow at http://127.0.0.1:9 cannot record the run \(", error)
    assert not Path("run").exists()


@pytest.mark.slow
def test_server_that_is_gone_in_the_middle_is_told_once_and_the_run_ends_well(
    services: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_batch = type(services).log_batch

    def refusing_curves(client: Any, run_id: str, metrics: Any = (), **others: Any) -> None:
        if metrics:
            raise ConnectionError("the server is gone")
        log_batch(client, run_id, **others)

    monkeypatch.setattr(type(services), "log_batch", refusing_curves)
    assert train("max_epochs=2", "logger=[tensorboard,mlflow]", "output_dir=run") == 0
    said = capsys.readouterr().out
    assert said.count("MLflow did not take points, how it ended (ConnectionError: the server is gone).") == 1
    assert read_summary(Path("run"))["status"] == "finished"
    assert len(read_metrics(Path("run/metrics.jsonl"))) == 2


@pytest.mark.slow
def test_search_is_a_run_with_its_best_figures_and_its_trials(services: Any) -> None:
    words = ["+experiment=search_digits", "+debug=search_fast", "device=cpu", "executor=serial", "output_dir=found"]
    assert search([*words, "logger=[mlflow,wandb]"]) == 0
    plain = json.loads(Path("found/search.json").read_text())
    by_name = {run.info.run_name: run for run in runs(services, "search_digits")}
    parent = by_name.pop("found")
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best/value"] == plain["best"]["value"]
    assert parent.data.metrics["best/test_accuracy"] == plain["best"]["test_accuracy"]
    assert {each.path for each in services.list_artifacts(parent.info.run_id)} >= {"search.json", "console.log"}
    ended = [trial for trial in plain["trials"] if trial["params"] is not None]
    assert sorted(by_name) == [f"trial_{trial['trial']:05}" for trial in ended]
    for trial in ended:
        run = by_name[f"trial_{trial['trial']:05}"]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.metrics["search/validation_accuracy_by_samples_seen"] == trial["value"]
    rows = wandb_history(Path("found/wandb"))
    assert [row["trials/nrows"] for row in rows if "trials/nrows" in row] == [len(ended)]
    assert not Path("found/tensorboard").exists()
