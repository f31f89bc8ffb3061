"""Recorded runs: what is kept of them, their tables and pictures."""

from __future__ import annotations

import pytest

from experiments.grids import recorded_runs
from experiments.grids.recorded_runs import RecordedRuns
from experiments.tables import recorded_plot, recorded_report
from tests.unit.experiments.samples import accuracy_result, cells

RUNS = RecordedRuns("any", experiment="any", target_accuracy=0.88)


def test_table_says_when_the_target_was_reached() -> None:
    assert cells(recorded_report.summary_table(accuracy_result(), 0.88), -1) == [
        "0", "2", "64", "bf16", "threads", "2", "0.8800", "0.8850", "2", "2.0", "2.5", "1,234",
    ]  # fmt: skip


def test_table_of_a_target_out_of_reach_leaves_epochs_and_minutes_open() -> None:
    table = recorded_report.summary_table(accuracy_result(), 0.9)
    assert cells(table, 0)[8:10] == ["epochs to 0.9", "minutes to 0.9"]
    assert cells(table, -1)[8:10] == ["–", "–"]


def test_table_of_several_seeds_ends_with_their_mean() -> None:
    result = accuracy_result(seeds=2)
    result["runs"][1]["summary"] = {**result["runs"][1]["summary"], "test_accuracy": 0.8, "best_test_accuracy": 0.9}
    mean = ["mean", *[""] * 5, "0.8400", "0.8925", *[""] * 4]
    assert cells(recorded_report.summary_table(result, 0.88), -1) == mean


def test_table_shows_workers_and_waiting_where_data_was_loaded_by_workers() -> None:
    result = accuracy_result(seeds=2)
    result["runs"][0]["summary"].update(num_workers=3, data_wait_share=0.013)
    result["runs"][1]["summary"].update(num_workers=None, data_wait_share=None)
    table = recorded_report.summary_table(result, 0.88)
    assert [cells(table, line)[-2:] for line in (0, 2, 3, 4)] == [
        ["workers", "waiting for data"], ["3", "1.3%"], ["–", "–"], ["", ""],
    ]  # fmt: skip


def test_table_of_data_on_the_device_says_nothing_of_workers() -> None:
    result = accuracy_result()
    result["runs"][0]["summary"].update(num_workers=None, data_wait_share=None)
    assert cells(recorded_report.summary_table(result, 0.88), 0)[-1] == "images/s"


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


def test_plot_has_a_line_a_run_and_the_target() -> None:
    accuracy, loss = recorded_plot.draw(RUNS, {"resnet32": accuracy_result(seeds=2)}).axes
    assert (len(accuracy.lines), len(loss.lines)) == (3, 2)
    assert list(accuracy.lines[0].get_xdata()) == [0.05, 0.1]
    assert list(accuracy.lines[-1].get_ydata()) == [0.88, 0.88]
    assert accuracy.get_xlabel() == "million samples seen"


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
