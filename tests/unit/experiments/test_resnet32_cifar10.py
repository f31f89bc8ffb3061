"""Runs on CIFAR-10: recorded, resumed and tabulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.resnet32_cifar10 import run
from experiments.tables.recorded_report import table_of
from tests.unit.experiments.samples import accuracy_result, cells


def test_accuracy_table_is_of_the_target_of_crossbow() -> None:
    table = table_of(run.RUNS)(accuracy_result())
    assert cells(table, 0)[8:10] == ["epochs to 0.88", "minutes to 0.88"]
    assert cells(table, -1)[8:10] == ["2", "2.0"]


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
