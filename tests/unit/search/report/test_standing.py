"""How a search stands, worked out by hand from four trials."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from crossbow_py.search.events import RunningTrial
from crossbow_py.search.hyperband import Segment, TrialState, best, planned_epochs
from crossbow_py.search.report.standing import (
    failures,
    leader,
    ranked,
    running_epochs,
    short_names,
    trained_epochs,
    value_range,
)


def test_ranked_trials_that_trained_longer_come_before_better_values(searched: Any) -> None:
    trials = (searched.trial(0, values={1.0: 0.99}), *searched.trials()[1:])
    assert [trial.trial for trial in ranked(trials, maximize=True)] == [1, 2, 0]


def test_ranked_first_is_the_best_that_hyperband_names(searched: Any) -> None:
    results: dict[Segment, float | None] = {Segment(3, 0): None}
    for trial in searched.trials():
        results |= {Segment(trial.trial, rung): value for rung, value in enumerate(trial.values.values())}
    brackets = searched.info().brackets
    expected, found = best(brackets, results, maximize=True), leader(brackets, searched.trials(), maximize=True)
    assert found is not None and ranked(searched.trials(), maximize=True)[0].trial == expected == found.trial


def test_failures_are_first_lines_of_reasons_the_most_frequent_first(searched: Any) -> None:
    lost = "loss is not finite"
    reasons = {3: "ValueError: no such layer", 4: lost, 6: f"{lost}\nat step 7", 7: None, 8: "x" * 999}
    failed = [dataclasses.replace(searched.trial(3, reason=reason), trial=n) for n, reason in reasons.items()]
    assert failures([searched.trial(0), *failed]) == {
        "loss is not finite": [4, 6],
        "ValueError: no such layer": [3],
        "for no reason that was recorded": [7],
        "x" * 159 + "…": [8],
    }


def test_ranked_trials_that_failed_are_the_last_and_never_lead(searched: Any) -> None:
    failed = searched.trial(1, state=TrialState.FAILED)
    assert [trial.trial for trial in ranked([failed, searched.trial(0)], maximize=True)] == [0, 1]
    brackets = searched.info().brackets
    found = leader(brackets, [failed, searched.trial(0)], maximize=True)
    assert found is not None and found.trial == 0
    assert leader(brackets, [failed], maximize=True) is None


def test_epochs_of_a_search_are_those_of_its_segments(searched: Any) -> None:
    brackets = searched.info().brackets
    # 4 trials train an epoch, 2 of them another, and 1 two more
    assert planned_epochs(brackets) == 8.0
    # 1 + 4 + 2, and the one that failed on its first
    assert trained_epochs(brackets, searched.trials()) == 8.0
    assert trained_epochs(brackets, [searched.waiting(0), searched.trial(2)]) == 2.0
    assert running_epochs(brackets, [RunningTrial(1, 2, 0.25, 0), RunningTrial(0, 0, 0.5, 0)]) == 1.0


def test_short_names_of_keys_that_end_alike_keep_what_tells_them_apart() -> None:
    names = short_names(["optimizer", "optimizer.name", "model.name", "optimizer.learning_rate", "seed"])
    assert list(names.values()) == ["optimizer", "optimizer.name", "model.name", "learning_rate", "seed"]


def test_value_range_leaves_out_trials_that_learned_nothing(searched: Any) -> None:
    # values 0.1, 0.8, 0.82, 0.84, 0.9: the quartile is 0.8, and 0.9 - 1.5 · 0.1 is the end
    trials = [searched.trial(0, values=dict(enumerate((0.1, 0.8, 0.82, 0.84, 0.9))))]
    assert value_range(trials, maximize=True) == pytest.approx((0.75, 0.9))
    losses = [searched.trial(0, values=dict(enumerate((9.0, 0.2, 0.18, 0.16, 0.1))))]
    assert value_range(losses, maximize=False) == pytest.approx((0.1, 0.25))


def test_value_range_of_equal_values_is_not_empty_and_of_none_there_is_none(searched: Any) -> None:
    assert value_range([searched.trial(0)], maximize=True) == pytest.approx((0.495, 0.505))
    assert value_range([searched.trial(3)], maximize=True) is None
