"""Stop conditions: which one ends a run, and at which sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.train import run_settings
from crossbow_py.train.run_settings import RunSettings, StopConditions


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


@pytest.mark.parametrize(
    ("stops", "samples", "seconds", "reason"),
    [
        ({"max_epochs": 1.5}, 149, 0.0, None),
        ({"max_epochs": 1.5}, 150, 0.0, "max_epochs"),
        ({"max_epochs": 1.5}, 163, 0.0, "max_epochs"),
        ({"max_epochs": 0.07}, 7, 0.0, "max_epochs"),  # 7.000000000000001 samples in floating point
        ({"max_samples": 50, "max_time_s": 2.0}, 49, 1.99, None),
        ({"max_samples": 50, "max_time_s": 2.0}, 50, 0.0, "max_samples"),
        ({"max_samples": 50, "max_time_s": 2.0}, 1, 2.0, "max_time_s"),
        ({"target_accuracy": 0.9}, 10**9, 1e9, None),
    ],
)
def test_round_that_reaches_a_limit_ends_the_run(stops: Any, samples: int, seconds: float, reason: str | None) -> None:
    assert StopConditions(**stops).after_round(samples, 100, seconds) == reason


@pytest.mark.parametrize(
    ("accuracy", "loss", "reason"),
    [
        (0.899, 0.301, None),
        (0.9, 0.5, "target_accuracy"),
        (0.1, 0.3, "target_loss"),
        (None, None, None),
        (math.nan, math.nan, None),
    ],
)
def test_targets_are_reached_at_equality(accuracy: float | None, loss: float | None, reason: str | None) -> None:
    assert StopConditions(target_accuracy=0.9, target_loss=0.3).after_evaluation(accuracy, loss) == reason
    assert StopConditions(max_epochs=1).after_evaluation(accuracy, loss) is None


@pytest.mark.parametrize(
    ("stops", "planned"),
    [
        ({"max_epochs": 3, "max_samples": 1000}, 300),
        ({"max_epochs": 30, "max_samples": 1000}, 1000),
        ({"max_epochs": 0.001}, 1),  # less than a sample still trains one round
        ({"target_accuracy": 0.9, "max_time_s": 5}, None),
    ],
)
def test_planned_samples_is_the_nearer_limit_and_none_without_one(stops: Any, planned: int | None) -> None:
    assert StopConditions(**stops).planned_samples(100) == planned


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


@pytest.mark.parametrize(
    ("executor", "device", "asked"), [("auto", "auto", True), ("streams", "cuda", True), ("fused", "cuda", False),
                                      ("auto", "cpu", False)]
)  # fmt: skip
def test_hardware_queues_are_asked_for_where_learners_may_run_on_streams(
    executor: str, device: Any, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(run_settings, "prepare_environment", lambda: calls.append(True))
    monkeypatch.setattr(run_settings, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(run_settings, "choose_precision", lambda name, device: FP32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run_settings.choose(RunSettings(executor=executor, device=device), None)
    assert bool(calls) is asked
