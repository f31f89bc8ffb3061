"""Accuracy runs: recorded, resumed, tabulated and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.common.machine import machine
from experiments.resnet32_cifar10 import plot, report, run


def accuracy_result(seeds: int = 1) -> dict[str, Any]:
    """Two epochs, the second of which reaches the target."""
    epochs = [
        {"epoch": 1, "samples_seen": 50_000, "train_loss": 1.5, "test_accuracy": 0.5, "elapsed_s": 60.0},
        {"epoch": 2, "samples_seen": 100_000, "train_loss": 0.7, "test_accuracy": 0.885, "elapsed_s": 120.0},
    ]
    summary = {
        "num_learners": 2, "batch_size": 64, "precision": "bf16", "executor": "threads", "epochs": 2.0,
        "samples_seen": 100_000, "test_accuracy": 0.88, "best_test_accuracy": 0.885, "train_time_s": 150.0,
        "images_per_s": 1234.5,
    }  # fmt: skip
    return {"machine": machine(), "runs": [{"summary": {**summary, "seed": s}, "epochs": epochs} for s in range(seeds)]}


def test_accuracy_table_says_when_the_target_was_reached() -> None:
    table = report.summary_table(accuracy_result())
    assert [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")] == [
        "0", "2", "64", "bf16", "threads", "2", "0.8800", "0.8850", "2", "2.0", "2.5", "1,234",
    ]  # fmt: skip


def test_accuracy_table_of_several_seeds_ends_with_their_mean() -> None:
    table = report.summary_table(accuracy_result(seeds=2))
    assert table.splitlines()[-1].startswith("| mean")
    assert "0.8800" in table.splitlines()[-1]


def test_plot_has_a_line_a_run_and_the_target() -> None:
    figure = plot.draw({"resnet32": accuracy_result(seeds=2)})
    accuracy, loss = figure.axes
    assert (len(accuracy.lines), len(loss.lines)) == (3, 2)
    assert list(accuracy.lines[0].get_xdata()) == [0.05, 0.1]
    assert list(accuracy.lines[-1].get_ydata()) == [0.88, 0.88]


def test_accuracy_run_given_again_goes_on_and_keeps_no_path_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line = ["--name", "short", "--seeds", "0,1", "--runs", str(tmp_path), "--results", str(tmp_path / "out"),
                    "model=mlp", "model.hidden=[16]", "data=digits", "device=cpu"]  # fmt: skip
    assert run.main([*command_line, "max_epochs=1"]) == 0
    assert run.main([*command_line, "max_epochs=2"]) == 0
    capsys.readouterr()
    result = json.loads((tmp_path / "out" / "short.json").read_text())
    assert result["n"] == len(result["runs"]) == 2
    assert [[record["epoch"] for record in one["epochs"]] for one in result["runs"]] == [[1, 2], [1, 2]]
    assert all(one["summary"]["images_per_s"] > 0 for one in result["runs"])
    assert str(tmp_path) not in json.dumps(result["runs"])


def test_accuracy_run_that_fails_writes_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--runs", str(tmp_path), "--results", str(tmp_path), "batch_size=0"]
    assert run.main(options) == 2
    assert capsys.readouterr().err.startswith("error: batch_size")
    assert list(tmp_path.glob("*.json")) == []
