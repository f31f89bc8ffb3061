"""Event files of a search, read back with TensorBoard's own readers."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.hparams import api_pb2, metadata

from crossbow_py.core.errors import UserError
from crossbow_py.search.events import RunningTrial
from crossbow_py.search.hyperband import TrialState
from crossbow_py.search.report.tensorboard import BEST_TAG, PACE_TAG, SearchTensorBoard, trial_files
from tests.event_files import read_events

TAG = "search/validation_accuracy_by_samples_seen"


def _written(folder: Path, searched: Any, *steps: Any) -> SearchTensorBoard:
    board = SearchTensorBoard(folder, print, lambda: 7.0)
    board.on_start(searched.info())
    for trials in steps:
        board.on_trials(trials)
    board.close()
    return board


def _points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, pytest.approx(event.value)) for event in read_events(folder).Scalars(tag)]


def _hparams(folder: Path, tag: str) -> Any:
    return read_events(folder).SummaryMetadata(tag).plugin_data.content


def test_trial_is_a_run_with_its_values_at_samples_seen(tmp_path: Path, searched: Any) -> None:
    _written(tmp_path, searched, searched.trials())
    # 100 images an epoch
    assert _points(tmp_path / "trial_00001", TAG) == [(100, 0.75), (200, 0.8), (400, 0.875)]
    assert _points(tmp_path / "trial_00002", TAG) == [(100, 0.625), (200, 0.5)]
    assert TAG not in read_events(tmp_path / "trial_00003").Tags()["scalars"]


def test_trial_has_its_parameters_and_how_it_ended(tmp_path: Path, searched: Any) -> None:
    _written(tmp_path, searched, searched.trials())
    content = _hparams(tmp_path / "trial_00001", metadata.SESSION_START_INFO_TAG)
    started = metadata.parse_session_start_info_plugin_data(content)
    info = searched.info()
    # By the search's folder: trials of several searches below one log folder are not repetitions of one.
    assert started.group_name == f"{info.output_dir} trial 1" if info.output_dir else "trial 1"
    assert started.hparams["optimizer"].string_value == "sgd"
    assert started.hparams["optimizer.learning_rate"].number_value == 0.01
    statuses = {}
    for number in (1, 3):
        content = _hparams(tmp_path / f"trial_0000{number}", metadata.SESSION_END_INFO_TAG)
        statuses[number] = metadata.parse_session_end_info_plugin_data(content).status
    assert statuses == {1: api_pb2.STATUS_SUCCESS, 3: api_pb2.STATUS_FAILURE}


def test_space_says_names_ranges_and_the_metric(tmp_path: Path, searched: Any) -> None:
    _written(tmp_path, searched)
    experiment = metadata.parse_experiment_plugin_data(_hparams(tmp_path, metadata.EXPERIMENT_TAG))
    infos = {info.name: info for info in experiment.hparam_infos}
    assert list(infos) == ["optimizer", "optimizer.learning_rate", "optimizer.momentum"]
    rate = infos["optimizer.learning_rate"].domain_interval
    assert (rate.min_value, rate.max_value) == (0.001, 0.1)
    assert {value.string_value for value in infos["optimizer"].domain_discrete.values} == {"sgd", "adamw"}
    assert [info.name.tag for info in experiment.metric_infos] == [TAG]


def test_trial_that_goes_on_is_added_to_and_nothing_is_written_twice(tmp_path: Path, searched: Any) -> None:
    early = searched.trial(1, rung=0, value=0.75, values={1.0: 0.75}, state=TrialState.PAUSED)
    _written(tmp_path, searched, (early,), searched.trials(), searched.trials())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("trial_*/*")}
    _written(tmp_path, searched, searched.trials())  # a second worker, or the same search gone on with
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("trial_*/*")} == before
    assert _points(tmp_path / "trial_00001", TAG) == [(100, 0.75), (200, 0.8), (400, 0.875)]


def test_worker_has_best_value_and_pace_by_samples_of_all_trials(tmp_path: Path, searched: Any) -> None:
    board = SearchTensorBoard(tmp_path, print)
    board.on_start(searched.info())
    board.on_progress(searched.progress(images_per_s=150.0))  # of how many samples is not known yet
    board.on_trials((searched.trial(0), searched.waiting(1)))
    for images_per_s in (250.0, 300.0):  # one point for each number of samples
        board.on_progress(searched.progress(RunningTrial(1, 0, 0.5, 0), images_per_s=images_per_s))
    board.on_trials(searched.trials())
    board.on_progress(searched.progress(images_per_s=350.0))
    board.on_end(searched.summary())
    board.close()
    own = tmp_path / "worker_host_1"
    # 100 images an epoch: 1, 4 and 2 epochs up to the last values, and nothing of the trial that failed
    assert _points(own, BEST_TAG) == [(100, 0.5), (700, 0.875)]
    assert _points(own, PACE_TAG) == [(100, 250.0), (700, 350.0)]
    (result,) = read_events(own).Tensors("result/text_summary")
    assert result.step == 700
    (failed,) = read_events(own).Tensors("failed_trials/text_summary")
    assert failed.tensor_proto.string_val == [b"- 3: `ValueError: no such layer`"]


@pytest.mark.slow
def test_search_that_goes_on_draws_to_the_right_of_where_it_was_killed(tmp_path: Path, searched: Any) -> None:
    """In a container its process has the same number again, and so the same run."""
    early = (
        searched.trial(0),
        searched.trial(1, rung=1, value=0.8, values={1.0: 0.75, 2.0: 0.8}, state=TrialState.PROMOTED),
    )
    killed = SearchTensorBoard(tmp_path, print)
    killed.on_start(searched.info())
    killed.on_trials(early)
    killed.on_progress(searched.progress(RunningTrial(1, 2, 0.75, 0), images_per_s=250.0))
    killed.close()  # for its points to be there; no end was told
    begun = int(time.time())
    while int(time.time()) == begun:  # files are read in the order of their seconds
        time.sleep(0.01)
    again = SearchTensorBoard(tmp_path, print)
    again.on_start(searched.info(num_finished_segments=3))
    again.on_trials(early)
    again.on_progress(searched.progress(RunningTrial(1, 2, 0.0, 0), images_per_s=200.0))
    again.on_trials(searched.trials())
    again.on_progress(searched.progress(images_per_s=240.0))
    again.close()
    own = tmp_path / "worker_host_1"
    assert _points(own, BEST_TAG) == [(300, 0.8), (300, 0.8), (700, 0.875)]
    assert _points(own, PACE_TAG) == [(300, 250.0), (300, 200.0), (700, 240.0)]


def test_folder_that_cannot_be_written_is_said_and_does_not_end_the_search(tmp_path: Path, searched: Any) -> None:
    said: list[str] = []
    board = SearchTensorBoard(tmp_path, said.append)
    board.on_start(searched.info())
    (tmp_path / "trial_00000").touch()  # a file where a folder belongs
    board.on_trials((searched.trial(0),))
    board.close()
    assert said
    assert all("was not written" in line for line in said)


def test_trials_of_two_searches_have_names_that_differ_and_sort_as_numbers(searched: Any) -> None:
    def name(number: int, folder: str | None) -> str:
        info = replace(searched.info(), output_dir=folder, num_trials=27)
        (_, started), *_ = next(iter(trial_files(info, searched.trial(number, values={1.0: 0.5}), 0.0).values()))
        content = next(value for value in started.value if value.tag == metadata.SESSION_START_INFO_TAG)
        return str(metadata.parse_session_start_info_plugin_data(content.metadata.plugin_data.content).group_name)

    assert name(2, "runs/a") == "runs/a trial 02" and name(2, "runs/b") == "runs/b trial 02"
    assert name(2, None) == "trial 02"


def test_file_in_place_of_the_workers_folder_is_one_line(tmp_path: Path, searched: Any) -> None:
    info = searched.info()
    _written(tmp_path, searched)
    (own,) = tmp_path.glob("worker_*")
    shutil.rmtree(own)
    own.touch()
    with pytest.raises(UserError, match=r"worker_.* cannot be written \(File exists\); choose another folder"):
        SearchTensorBoard(tmp_path, print).on_start(info)
