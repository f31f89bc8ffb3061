"""What is said of a search that others train, by hand-worked numbers: seven rungs, eight epochs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.cli.configuration import compose
from crossbow_py.search.config import SearchConfig
from crossbow_py.search.events import BestTrial, TrialRecord
from crossbow_py.search.report.follower import Follower

WORDS = ["+experiment=search_digits", "method=successive_halving", "num_trials=4", "max_epochs=4", "eta=2"]
FIRST = "trial 0 at 1 epoch: validation accuracy 0.5000 (best so far at this rung) · optimizer sgd · "
BEST = BestTrial(1, 0.875, 4.0, {}, 7, 0.8125, None, "best/model.safetensors", "python -m crossbow_py.train seed=7")


class Told:
    """A follower, its clock, what it reads and what it says."""

    def __init__(self, trials: tuple[TrialRecord, ...], is_new: bool = True) -> None:
        self.trials, self.now, self.said = trials, 0.0, list[str]()
        config = compose(WORDS, SearchConfig)
        self.follower = Follower(
            config, True, lambda: self.trials, self.said.append, is_new=is_new, clock=lambda: self.now
        )

    def take(self) -> list[str]:
        said, self.said[:] = list(self.said), []
        return said


@pytest.fixture
def begun(searched: Any) -> tuple[TrialRecord, ...]:
    """Trial 0 has its first value."""
    return (searched.trial(0), *map(searched.waiting, (1, 2, 3)))


def test_each_result_is_a_line_once_and_silence_ends_with_where_the_search_stands(
    searched: Any, begun: tuple[TrialRecord, ...]
) -> None:
    told = Told(begun)
    told.follower.look(2)
    assert told.take() == [f"{FIRST}learning_rate 0.001 · momentum 0"]
    told.trials = searched.trials()
    told.now = 0.5
    told.follower.look(2)
    assert told.take() == []  # the storage is not asked all the time
    told.trials = begun
    told.now = 29.0
    told.follower.look(2)
    assert told.take() == []
    told.now = 30.0  # for one epoch: seven are left
    told.follower.look(2)
    assert told.take() == ["1 of 7 rungs · best 0.5000 by trial 0 · about 3:30 left · 0:30 so far · 2 workers"]
    told.now = 31.0
    told.trials = searched.trials()
    told.follower.look(2)
    assert [line.split(":")[0] for line in told.take()] == [
        "trial 1 at 1 epoch", "trial 1 at 2 epochs", "trial 1 at 4 epochs", "trial 2 at 1 epoch", "trial 2 at 2 epochs",
    ]  # fmt: skip


def test_what_was_there_before_is_counted_and_no_news(begun: tuple[TrialRecord, ...]) -> None:
    told = Told(begun, is_new=False)
    told.follower.look(1)
    assert told.take() == ["going on: 1 of 7 rungs are done"]
    told.now = 30.0
    told.follower.look(1)
    assert told.take() == ["1 of 7 rungs · best 0.5000 by trial 0 · 0:30 so far · 1 worker"]


def ended(searched: Any, status: str, folder: Path) -> list[str]:
    told = Told(searched.trials())
    told.follower.look(1)
    told.take()
    told.now = 12.5
    told.follower.end(status, folder)
    return told.take()


def test_end_has_the_best_trial_as_its_worker_recorded_it(searched: Any, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text(json.dumps({"best": dataclasses.asdict(BEST)}))
    assert ended(searched, "finished", tmp_path) == [
        "",
        "search_digits finished: 4 trials (2 pruned, 1 complete, 1 failed)",
        "  failed         trial 3: ValueError: no such layer",
        "  best           trial 1: validation accuracy 0.8750 after 4 epochs",
        "  test accuracy  0.8125",
        "  parameters     optimizer=sgd",
        "                 optimizer.learning_rate=0.01",
        "                 optimizer.momentum=0.9",
        "  model          best/model.safetensors",
        "  to train it    python -m crossbow_py.train seed=7",
        "  time           12.5 s",
        f"  folder         {tmp_path}",
    ]


@pytest.mark.parametrize("changed", [{"trial": 2}, {"value": 0.5}, {"command": None}, {"test_accuracy": "1"}])
def test_record_of_another_trial_is_not_believed_and_the_model_is_with_its_worker(
    changed: dict[str, Any], searched: Any, tmp_path: Path
) -> None:
    (tmp_path / "search.json").write_text(json.dumps({"best": {**dataclasses.asdict(BEST), **changed}}))
    lines = ended(searched, "finished", tmp_path)
    assert lines[3:5] == [
        "  best so far    trial 1: validation accuracy 0.8750 after 4 epochs",
        f"  model          {tmp_path / 'best'} on host",
    ]


def test_search_that_is_stopped_says_how_it_goes_on(searched: Any, tmp_path: Path) -> None:
    lines = ended(searched, "interrupted", tmp_path)
    assert lines[1].startswith("search_digits interrupted: 4 trials")
    assert lines[3] == "  best so far    trial 1: validation accuracy 0.8750 after 4 epochs"
    assert lines[-1] == "  to go on       the same command: what is finished is kept"
    assert not any(line.startswith("  model") for line in lines)
