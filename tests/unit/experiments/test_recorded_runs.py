"""Recorded runs: trained, gone on with, what is kept of them, their tables and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.bench.results import read_result
from experiments.flowers import run as flowers
from experiments.grids import recorded_runs
from experiments.grids.recorded_runs import RecordedRuns, table_of
from experiments.tables import recorded_plot
from tests.unit.experiments.samples import accuracy_result, cells

RUNS = RecordedRuns("any", experiment="any", target_accuracy=0.88)


def test_table_of_a_target_out_of_reach_leaves_epochs_and_minutes_open() -> None:
    table = recorded_runs.summary_table(accuracy_result(), 0.9)
    assert cells(table, 0)[8:10] == ["epochs to 0.9", "minutes to 0.9"]
    assert cells(table, -1)[8:10] == ["–", "–"]


def test_table_of_several_seeds_ends_with_their_mean() -> None:
    result = accuracy_result(seeds=2)
    result["runs"][1]["summary"] = {**result["runs"][1]["summary"], "test_accuracy": 0.8, "best_test_accuracy": 0.9}
    mean = ["mean", *[""] * 5, "0.8400", "0.8925", *[""] * 4]
    assert cells(recorded_runs.summary_table(result, 0.88), -1) == mean


def test_table_shows_workers_and_waiting_where_data_was_loaded_by_workers() -> None:
    result = accuracy_result(seeds=2)
    result["runs"][0]["summary"].update(num_workers=3, data_wait_share=0.013)
    result["runs"][1]["summary"].update(num_workers=None, data_wait_share=None)
    table = recorded_runs.summary_table(result, 0.88)
    assert [cells(table, line)[-2:] for line in (0, 2, 3, 4)] == [
        ["workers", "waiting for data"], ["3", "1.3%"], ["–", "–"], ["", ""],
    ]  # fmt: skip


def test_table_of_data_on_the_device_says_nothing_of_workers() -> None:
    result = accuracy_result()
    result["runs"][0]["summary"].update(num_workers=None, data_wait_share=None)
    assert cells(recorded_runs.summary_table(result, 0.88), 0)[-1] == "images/s"


def test_waiting_is_weighted_by_how_long_an_epoch_took() -> None:
    epochs = [{"elapsed_s": 30.0, "data_wait_share": 0.4}, {"elapsed_s": 40.0, "data_wait_share": 0.0}]
    assert recorded_runs.wait_share(epochs) == pytest.approx(12 / 40)


@pytest.mark.parametrize("epoch", [{"elapsed_s": 30.0, "data_wait_share": None}, {"elapsed_s": 30.0}])
def test_waiting_of_an_epoch_that_did_not_count_it_is_unknown(epoch: dict[str, float | None]) -> None:
    assert recorded_runs.wait_share([epoch]) is None


def test_configuration_is_kept_without_paths_of_the_machine() -> None:
    data = {"name": "image_folder", "root": "/data", "cache_dir": "/cache", "folder": "/data/photos"}
    config = {"seed": 1, "output_dir": "/runs/x", "resume": "auto", "data": data}
    assert recorded_runs.without_paths(config) == {"seed": 1, "data": {"name": "image_folder", "folder": "photos"}}


def test_configuration_keeps_a_folder_named_from_the_folder_of_data_sets() -> None:
    config = {"data": {"name": "image_folder", "folder": "flowers/small"}}
    assert recorded_runs.without_paths(config) == config


def test_plot_of_few_samples_counts_thousands_and_shows_chance() -> None:
    result = accuracy_result()
    (run,) = result["runs"]
    run["summary"]["samples_seen"] = 400
    run["epochs"] = [{**record, "samples_seen": 200 * record["epoch"]} for record in run["epochs"]]
    runs = RecordedRuns("any", experiment="any", target_accuracy=0.45, chance=0.2, shown_accuracy=(0.0, 1.0))
    accuracy = recorded_plot.draw(runs, {"flowers": result}).axes[0]
    assert list(accuracy.lines[0].get_xdata()) == [0.2, 0.4]
    assert [list(line.get_ydata()) for line in accuracy.lines[1:]] == [[0.45, 0.45], [0.2, 0.2]]
    assert (accuracy.get_xlabel(), accuracy.get_ylim()) == ("thousand samples seen", (0.0, 1.0))


def test_run_on_photographs_is_recorded_with_its_wait_for_data_also_when_given_again(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line = ["--seeds", "0", "--runs", str(tmp_path), "--results", str(tmp_path / "out"),
                    f"data.folder={photos}", "data.size=16", "data.resize=20", "data.cache=false", "num_workers=1",
                    "model=mlp", "model.hidden=[8]", "batch_size=2", "max_epochs=1", "executor=serial",
                    "device=cpu"]  # fmt: skip
    assert flowers.main(command_line) == 0
    first = read_result(tmp_path / "out" / "flowers.json")
    assert flowers.main(command_line) == 0
    capsys.readouterr()
    result = read_result(tmp_path / "out" / "flowers.json")
    (recorded,) = result["runs"]
    assert recorded["summary"]["num_workers"] == 1
    assert 0 < recorded["summary"]["data_wait_share"] <= 1
    assert recorded["summary"]["data_wait_share"] == first["runs"][0]["summary"]["data_wait_share"]
    assert str(tmp_path) not in json.dumps(result["runs"])
    table = table_of(flowers.RUNS)(result)
    assert cells(table, 0)[-6:-4] == ["epochs to 0.45", "minutes to 0.45"]
    assert cells(table, -1)[:3] == ["0", "2", "2"]
    assert cells(table, -1)[-2:] == ["1", f"{recorded['summary']['data_wait_share']:.1%}"]


def test_runs_on_photographs_are_three_seeds_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[list[str]] = []
    monkeypatch.setattr("experiments.grids.recorded_runs.train", lambda keys: trained.append(keys) or 0)
    monkeypatch.setattr("experiments.grids.recorded_runs.collect", lambda folder: folder.name)
    assert flowers.main(["--runs", str(tmp_path), "--results", str(tmp_path), "max_epochs=1"]) == 0
    assert [keys[:2] for keys in trained] == [["+experiment=flowers", f"seed={seed}"] for seed in (0, 1, 2)]
    assert trained[0][-1] == "max_epochs=1"
    assert json.loads((tmp_path / "flowers.json").read_text())["runs"] == ["seed-0", "seed-1", "seed-2"]


def test_accuracy_run_given_again_goes_on_and_keeps_no_path_of_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line = ["--experiment", "digits", "--name", "short", "--seeds", "0,1", "--runs", str(tmp_path),
                    "--results", str(tmp_path / "out"), "model=mlp", "model.hidden=[16]", "data=digits",
                    "device=cpu"]  # fmt: skip
    assert flowers.main([*command_line, "max_epochs=1"]) == 0
    assert flowers.main([*command_line, "max_epochs=2"]) == 0
    capsys.readouterr()
    result = read_result(tmp_path / "out" / "short.json")
    assert result["n"] == len(result["runs"]) == 2
    assert [[record["epoch"] for record in one["epochs"]] for one in result["runs"]] == [[1, 2], [1, 2]]
    assert all(one["summary"]["images_per_s"] > 0 for one in result["runs"])
    assert str(tmp_path) not in json.dumps(result["runs"])


def test_accuracy_run_that_fails_writes_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--runs", str(tmp_path), "--results", str(tmp_path), "batch_size=0"]
    assert flowers.main(options) == 2
    assert capsys.readouterr().err.startswith("error: batch_size")
    assert list(tmp_path.glob("*.json")) == []
