"""The runs on photographs: trained, gone on with, what is kept of them, and their table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench.results import read_result
from experiments.flowers import run as flowers
from tests.unit.experiments.samples import accuracy_result, cells


def test_table_of_several_seeds_ends_with_their_mean() -> None:
    result = accuracy_result(seeds=2)
    result["runs"][1]["summary"] = {**result["runs"][1]["summary"], "test_accuracy": 0.8, "best_test_accuracy": 0.9}
    result["runs"][0]["summary"].update(num_workers=3, data_wait_share=0.013)
    table = flowers.summary_table(result)
    assert cells(table, -1) == ["mean", *[""] * 5, "0.8400", "0.8925", *[""] * 6]
    assert [cells(table, line)[-2:] for line in (2, 3)] == [["3", "1.3%"], ["–", "–"]]


@pytest.mark.parametrize(("epochs", "share"), [
    ([{"elapsed_s": 30.0, "data_wait_share": 0.4}, {"elapsed_s": 40.0, "data_wait_share": 0.0}], 12 / 40),
    ([{"elapsed_s": 30.0, "data_wait_share": None}], None),
])  # fmt: skip
def test_waiting_is_weighted_by_how_long_an_epoch_took(
    epochs: list[dict[str, float | None]], share: float | None
) -> None:
    assert flowers.wait_share(epochs) == pytest.approx(share)


def test_configuration_is_kept_without_paths_of_the_machine() -> None:
    data = {"name": "image_folder", "root": "/data", "cache_dir": "/cache", "folder": "/data/photos"}
    config = {"seed": 1, "output_dir": "/runs/x", "resume": "auto", "data": data}
    assert flowers.without_paths(config) == {"seed": 1, "data": {"name": "image_folder", "folder": "photos"}}
    named = {"data": {"name": "image_folder", "folder": "flowers/small"}}
    assert flowers.without_paths(named) == named


def test_run_on_photographs_is_recorded_with_its_wait_for_data_also_when_given_again(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line = ["--seeds", "0", "--runs", str(tmp_path), "--results", str(tmp_path / "out"),
                    f"data.folder={photos}", "data.size=16", "data.resize=20", "data.cache=false", "num_workers=1",
                    "model=mlp", "model.hidden=[8]", "batch_size=2", "executor=serial", "device=cpu"]  # fmt: skip
    assert flowers.main([*command_line, "max_epochs=1"]) == 0
    assert flowers.main([*command_line, "max_epochs=2"]) == 0
    capsys.readouterr()
    result = read_result(tmp_path / "out" / "flowers.json")
    (recorded,) = result["runs"]
    assert [record["epoch"] for record in recorded["epochs"]] == [1, 2]
    assert recorded["summary"]["num_workers"] == 1
    assert 0 < recorded["summary"]["data_wait_share"] <= 1
    assert str(tmp_path) not in json.dumps(result["runs"])
    table = flowers.summary_table(result)
    assert cells(table, 2)[:3] == ["0", "2", "2"]
    assert cells(table, 2)[-2:] == ["1", f"{recorded['summary']['data_wait_share']:.1%}"]


def test_run_that_fails_writes_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flowers.main(["--runs", str(tmp_path), "--results", str(tmp_path), "batch_size=0"]) == 2
    assert capsys.readouterr().err.startswith("error: batch_size")
    assert list(tmp_path.glob("*.json")) == []
