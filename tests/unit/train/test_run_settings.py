"""Stop conditions: which one ends a run, and at which sample."""

from __future__ import annotations

import math

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.train.run_settings import StopConditions


def test_no_condition_at_all_is_refused_with_the_names() -> None:
    with pytest.raises(UserError, match=r"needs an end, got none; set one of max_epochs, max_samples, max_time_s, "):
        StopConditions()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_epochs", 0, "max_epochs must be greater than 0, got 0"),
        ("max_epochs", math.inf, "max_epochs must be a finite number, got inf"),
        ("max_samples", 0, "max_samples must be at least 1, got 0"),
        ("max_samples", 1.5, "max_samples must be a whole number or null, got 1.5"),
        ("max_time_s", -1.0, "max_time_s must be greater than 0"),
        ("target_accuracy", 88, "target_accuracy must be at most 1, got 88"),
        ("target_loss", math.nan, "target_loss must be a finite number, got nan"),
    ],
)
def test_impossible_condition_is_refused_in_one_sentence(field: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        StopConditions(**{field: value})


def test_max_epochs_ends_with_the_first_round_at_or_past_its_sample() -> None:
    stop = StopConditions(max_epochs=1.5)
    assert [stop.after_round(seen, 100, 0.0) for seen in (149, 150, 163)] == [None, "max_epochs", "max_epochs"]


def test_max_epochs_that_is_not_exact_in_binary_ends_on_the_whole_sample() -> None:
    assert StopConditions(max_epochs=0.7).after_round(7, 10, 0.0) == "max_epochs"


def test_max_epochs_smaller_than_a_sample_still_trains_one_round() -> None:
    assert StopConditions(max_epochs=0.001).planned_samples(100) == 1


def test_max_samples_and_time_end_the_run_by_their_names() -> None:
    stop = StopConditions(max_samples=50, max_time_s=2.0)
    assert stop.after_round(49, 100, 1.99) is None
    assert stop.after_round(50, 100, 0.0) == "max_samples"
    assert stop.after_round(1, 100, 2.0) == "max_time_s"


def test_targets_are_reached_at_equality() -> None:
    stop = StopConditions(target_accuracy=0.9, target_loss=0.3)
    assert stop.after_evaluation(0.899, 0.301) is None
    assert stop.after_evaluation(0.9, 0.5) == "target_accuracy"
    assert stop.after_evaluation(0.1, 0.3) == "target_loss"


def test_targets_without_a_measurement_go_on() -> None:
    stop = StopConditions(target_accuracy=0.9, target_loss=0.3)
    assert stop.after_evaluation(None, None) is None
    assert stop.after_evaluation(math.nan, math.nan) is None


def test_conditions_not_set_never_stop() -> None:
    assert StopConditions(target_accuracy=0.9).after_round(10**9, 100, 1e9) is None
    assert StopConditions(max_epochs=1).after_evaluation(1.0, 0.0) is None


def test_planned_samples_is_the_nearer_limit_and_none_without_one() -> None:
    assert StopConditions(max_epochs=3, max_samples=1000).planned_samples(100) == 300
    assert StopConditions(max_epochs=30, max_samples=1000).planned_samples(100) == 1000
    assert StopConditions(target_accuracy=0.9, max_time_s=5).planned_samples(100) is None


def test_targets_that_nothing_measures_are_refused() -> None:
    accuracy, loss = StopConditions(target_accuracy=0.9), StopConditions(target_loss=0.3)
    for stop in (accuracy, loss):
        with pytest.raises(UserError, match="got neither test_data nor validation_data"):
            stop.check_measured(False, lambda: True)
    with pytest.raises(UserError, match=r"target_accuracy=0\.9 is for outputs .*; set target_loss"):
        accuracy.check_measured(True, lambda: False)
    accuracy.check_measured(True, lambda: True)
    loss.check_measured(True, lambda: False)
    StopConditions(max_epochs=1).check_measured(False, lambda: False)
