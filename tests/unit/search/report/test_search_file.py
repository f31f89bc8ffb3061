"""search.json, while a search goes on and when it has ended."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from crossbow_py.search.events import BestTrial
from crossbow_py.search.report.search_file import SearchFile, ended_plain, recorded_summary, running_plain


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def _read(folder: Path) -> dict[str, Any]:
    plain = json.loads((folder / "search.json").read_text(), parse_constant=_refuse)
    assert isinstance(plain, dict)
    return plain


def test_file_of_an_ended_search_has_status_trials_best_and_times(tmp_path: Path, searched: Any) -> None:
    SearchFile(tmp_path, print).on_end(searched.summary())
    plain = _read(tmp_path)
    assert (plain["experiment"], plain["status"], plain["samples"]) == ("search_digits", "finished", 800)
    assert plain["overhead_share"] == 0.125
    assert plain["best"] == {
        "trial": 1, "value": 0.875, "epochs": 4.0, "seed": 11, "test_accuracy": 0.85, "test_loss": 0.5,
        "params": {"optimizer": "sgd", "optimizer.learning_rate": 0.01, "optimizer.momentum": 0.9},
        "model_path": "runs/x/model.safetensors", "command": "python -m crossbow_py.train model=mlp seed=11",
    }  # fmt: skip
    assert plain["trials"][1]["values"] == {"1": 0.75, "2": 0.8, "4": 0.875}
    assert plain["trials"][3] == {
        "trial": 3, "bracket": 0, "state": "failed", "rung": None, "value": None, "values": {}, "seconds": 2.0,
        "params": {"optimizer": "sgd", "optimizer.learning_rate": 0.05, "optimizer.momentum": 0.45},
        "worker": "host:1", "reason": "ValueError: no such layer",
    }  # fmt: skip
    assert plain["info"]["space"][1] == {"key": "optimizer.learning_rate", "low": 0.001, "high": 0.1, "log": True}
    assert plain["info"]["brackets"] == [{"trials": 4, "epochs": [1.0, 2.0, 4.0], "sizes": [4, 2, 1]}]


def test_file_of_a_running_search_shows_its_trials_and_its_leader(tmp_path: Path, searched: Any) -> None:
    now = [0.0]
    file = SearchFile(tmp_path, print, lambda: now[0])
    file.on_start(searched.info())
    now[0] = 5.0
    file.on_trials((searched.trial(0), searched.waiting(1)))
    plain = _read(tmp_path)
    assert (plain["status"], plain["wall_time_s"]) == ("running", 5.0)
    assert [trial["state"] for trial in plain["trials"]] == ["pruned", "waiting"]
    assert (plain["best"]["trial"], plain["best"]["value"], plain["best"]["test_accuracy"]) == (0, 0.5, None)
    assert set(plain["best"]) == {field.name for field in dataclasses.fields(BestTrial)}


def test_file_is_there_as_soon_as_a_search_runs_and_kept_when_it_goes_on(tmp_path: Path, searched: Any) -> None:
    SearchFile(tmp_path, print).on_start(searched.info())
    assert (_read(tmp_path)["status"], _read(tmp_path)["trials"], _read(tmp_path)["best"]) == ("running", [], None)
    SearchFile(tmp_path, print).on_end(searched.summary(status="interrupted"))
    SearchFile(tmp_path, print).on_start(searched.info(num_finished_segments=6))
    assert len(_read(tmp_path)["trials"]) == 4


def test_file_of_a_running_search_is_written_at_most_every_three_seconds(tmp_path: Path, searched: Any) -> None:
    now = [0.0]
    file = SearchFile(tmp_path, print, lambda: now[0])
    file.on_start(searched.info())
    file.on_trials((searched.waiting(0),))
    now[0] = 2.9
    file.on_trials((searched.trial(0),))
    assert _read(tmp_path)["trials"][0]["state"] == "waiting"
    now[0] = 3.0
    file.on_progress(searched.progress())
    assert _read(tmp_path)["trials"][0]["state"] == "pruned"


def test_file_that_cannot_be_written_is_said_and_does_not_end_the_search(tmp_path: Path, searched: Any) -> None:
    said: list[str] = []
    SearchFile(tmp_path / "gone", said.append).on_end(searched.summary())
    assert len(said) == 1
    assert "search.json was not written (No such file or directory)" in said[0]


def test_file_of_an_ended_search_is_read_as_it_was_written(searched: Any) -> None:
    for summary in (searched.summary(notes=("packs of 4",)), searched.summary(best=None, trials=(searched.trial(3),))):
        plain = json.loads(json.dumps(ended_plain(summary)))
        assert recorded_summary(plain, summary.info, summary.trials) == summary


def test_file_that_is_of_no_ended_search_or_not_whole_is_not_read(searched: Any) -> None:
    info, trials, ended = searched.info(), searched.trials(), ended_plain(searched.summary())
    for plain in (
        {},
        running_plain(info, trials, 1.0),
        ended_plain(searched.summary(best=None, status="terminated")),  # with a leader that was not measured
        {**ended, "images_per_s": None},
        {**ended, "wall_time_s": "long"},
        {**ended, "samples": True},
        {**ended, "notes": 5},
        {**ended, "versions": "of yesterday"},
        {**ended, "best": {"trial": 1}},
        {**ended, "best": 1},
    ):
        assert recorded_summary(plain, info, trials) is None
