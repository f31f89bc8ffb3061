"""Runs and searches in offline files of Weights & Biases, read back with its own reader."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.telemetry.class_counts import ClassCounts
from crossbow_py.telemetry.loggers.chosen import trackers
from crossbow_py.telemetry.loggers.tracker import Subject, TrialRun
from crossbow_py.telemetry.loggers.wandb_logger import WandbLogger, WandbTracker
from tests.trackers import wandb_history, wandb_records

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, in_an_empty_folder: None) -> None:
    """The package reads its variables once in a process, unless it is torn down."""
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_GROUP", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def record(logger: WandbLogger, events: Any, folder: Path, epochs: range, **info: Any) -> None:
    logger.on_start(
        events.run_info(output_dir=str(folder), **{"hyper_parameters": {"optimizer.momentum": 0.9}, **info})
    )
    for epoch in epochs:
        logger.on_epoch(events.epoch_record(epoch, test_accuracy=0.5 + epoch / 10, metrics={"f1/a(b)": 0.25}))
    logger.on_class_counts(ClassCounts(np.array([[3, 1, 0], [0, 2, 0]])), "test", 3000)
    (folder / "config.yaml").write_text("seed: 0\n")
    logger.on_end(events.summary(output_dir=str(folder), status="interrupted"))
    logger.close()


@pytest.mark.slow
def test_run_that_is_stopped_and_goes_on_has_settings_curves_pictures_files_and_one_id(
    tmp_path: Path, events: Any
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    record(logger := WandbLogger(tags=["a"]), events, folder, range(1, 3))
    record(WandbLogger(), events, folder, range(3, 4), samples_seen=2000, hyper_parameters={"optimizer.momentum": 0.5})
    rows = wandb_history(folder / "wandb")
    assert [(row["samples_seen"], row["accuracy/test"]) for row in rows if "accuracy/test" in row] == [
        (1000, 0.6), (2000, 0.7), (3000, 0.8),
    ]  # fmt: skip
    assert [row["metrics/f1/a(b)"] for row in rows if "metrics/f1/a(b)" in row] == [0.25] * 3
    assert [row["samples_seen"] for row in rows if "confusion_matrix/test/path" in row] == [3000, 3000]
    began, went_on = (each[0] for each in _by_id(wandb_records(folder / "wandb", "run")))
    assert (began.project, began.display_name, list(began.tags)) == ("digits", "mine", ["a"])
    assert json.loads((folder / "wandb.json").read_text()) == {"run_id": began.run_id}
    assert went_on.run_id == began.run_id
    config = {item.key: json.loads(item.value_json) for item in began.config.update}
    assert (config["optimizer.momentum"], config["num_parameters"]) == (0.9, 84762)
    assert [each.exit_code for each in wandb_records(folder / "wandb", "exit")] == [130, 130]
    assert len(list(folder.glob("wandb/offline-run-*/files/crossbow_py/config.yaml"))) == 2
    assert began.run_id in logger.take_notes()[0]


def _by_id(runs: list[Any]) -> list[list[Any]]:
    """Records of runs, of each process."""
    return [runs[: len(runs) // 2], runs[len(runs) // 2 :]]


def test_files_and_names_follow_the_variables(tmp_path: Path, events: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DIR": str(tmp_path), "PROJECT": "theirs", "NAME": "named"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    (tmp_path / "mine").mkdir()
    logger = WandbLogger()
    logger.on_start(events.run_info(output_dir=str(tmp_path / "mine")))
    logger.close()
    (run,) = wandb_records(tmp_path / "wandb", "run")
    assert (run.project, run.display_name) == ("theirs", "named")
    assert [each.exit_code for each in wandb_records(tmp_path / "wandb", "exit")] == [1]


def test_link_in_the_place_of_the_folder_is_refused(tmp_path: Path, events: Any) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "wandb").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="has wandb as a link; remove it, or set WANDB_DIR"):
        WandbLogger().on_start(events.run_info(output_dir=str(tmp_path)))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_run_that_cannot_begin_is_refused_in_one_sentence(tmp_path: Path, events: Any) -> None:
    with pytest.raises(UserError) as refused:
        WandbLogger(project="a/b").on_start(events.run_info(output_dir=str(tmp_path)))
    assert str(refused.value).startswith("logger=[wandb]: Weights & Biases cannot record the run (")
    assert str(refused.value).endswith("set WANDB_MODE=offline, or leave wandb out.")


def test_mode_that_is_unknown_is_refused_before_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(UserError, match="WANDB_MODE must be one of online, offline, .*, got 'ofline'; correct it."):
        trackers(["wandb"])


def test_argument_that_wandb_does_not_take_is_refused_when_the_run_begins(events: Any) -> None:
    said = "passes its other arguments to wandb.init, and .*unexpected keyword argument 'projct'; correct them."
    with pytest.raises(UserError, match=said):
        WandbLogger(projct="x").on_start(events.run_info())


def test_search_has_a_group_and_a_table_of_its_trials(tmp_path: Path) -> None:
    tracker = WandbTracker()
    tracker.open(Subject("search", tmp_path, {"seed": 0}, {}, continues=False, worker="host:1"))
    tracker.trials(
        [
            TrialRun(0, {"lr": 0.1, "kind": "sgd"}, {100: 0.5, 200: 0.75}, failed=False),
            TrialRun(1, {"lr": 0.2}, {}, failed=True),
        ],
        "search/accuracy",
    )
    tracker.end("finished", 300, {"best/value": 0.75}, {"status": "finished"})
    run = wandb_records(tmp_path / "wandb", "run")[0]
    assert (run.display_name, run.run_group) == (f"{tmp_path.name} host:1", tmp_path.name)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["trial", "lr", "kind", "samples_seen", "search/accuracy", "failed"],
        "data": [[0, 0.1, "sgd", 200, 0.75, False], [1, 0.2, None, None, None, True]],
    }
    assert not (tmp_path / "wandb.json").exists()


def test_password_of_a_storage_on_the_command_line_is_not_recorded(
    tmp_path: Path, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["search", "seed=1", "storage='postgresql://me:se/cr et@host/x'", "more=redis://host/0?password=secret"]
    monkeypatch.setattr(sys, "argv", words)
    record(WandbLogger(), events, tmp_path, range(1, 2))
    assert sys.argv is words
    wandb.teardown()  # files are complete when its process has ended
    written = b"".join(path.read_bytes() for path in tmp_path.glob("**/*") if path.is_file())
    assert b"storage='postgresql://***" in written and b"more=redis://***" in written
    assert b"se/cr" not in written and b"secret" not in written
