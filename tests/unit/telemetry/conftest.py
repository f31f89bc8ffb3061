"""Events of a small run, for the listeners' tests, and a clock that is moved by hand."""

from __future__ import annotations

from typing import Any

import pytest

from crossbow_py.telemetry.events import EpochRecord, Progress, RunInfo, Summary


class FakeClock:
    """A clock, in whatever unit, that stands still until it is advanced."""

    def __init__(self, now: int = 0) -> None:
        self.now: float = now

    def __call__(self) -> Any:
        return self.now

    def advance(self, by: float) -> None:
        self.now += by


class Events:
    """Makes events; keyword arguments change single fields."""

    @staticmethod
    def run_info(**changes: Any) -> RunInfo:
        values: dict[str, Any] = {
            "experiment": "digits", "model": "mlp", "num_parameters": 84762, "data": "digits",
            "num_train_samples": 1000, "num_test_samples": 200, "device": "cpu", "executor": "threads",
            "precision": "fp32", "averaging": "sma", "num_learners": 2, "num_devices": 1, "batch_size": 16,
            "seed": 0, "planned_samples": 4000,
        }  # fmt: skip
        return RunInfo(**{**values, **changes})

    @staticmethod
    def progress(samples_seen: int, **changes: Any) -> Progress:
        values: dict[str, Any] = {
            "epoch": samples_seen / 1000, "train_loss": 0.5, "images_per_s": 250.0, "learning_rate": 0.1,
            "num_learners": 2, "elapsed_s": samples_seen / 250,
        }  # fmt: skip
        return Progress(samples_seen, **{**values, **changes})

    @staticmethod
    def epoch_record(epoch: int, **changes: Any) -> EpochRecord:
        values: dict[str, Any] = {
            "samples_seen": epoch * 1000, "train_loss": 0.25, "train_accuracy": 0.875, "test_loss": 0.5,
            "test_accuracy": 0.75, "images_per_s": 250.0, "num_learners": 2, "learning_rate": 0.1,
            "elapsed_s": epoch * 4.0, "spread": 0.125, "correction_norm": 2.0,
        }  # fmt: skip
        return EpochRecord(epoch=epoch, **{**values, **changes})

    @staticmethod
    def summary(**changes: Any) -> Summary:
        values: dict[str, Any] = {
            "experiment": "digits", "status": "finished", "stop_reason": "max_epochs", "device": "cpu",
            "executor": "threads", "precision": "fp32", "averaging": "sma", "model": "mlp", "data": "digits",
            "num_learners": 2, "num_devices": 1, "batch_size": 16, "epochs": 4.0, "samples_seen": 4000,
            "test_accuracy": 0.75, "test_loss": 0.5, "best_test_accuracy": 0.8, "best_validation_accuracy": None,
            "time_to_accuracy_s": None,
            "train_time_s": 16.0, "wall_time_s": 17.5, "images_per_s": 250.0, "seed": 0, "num_reseeded": 0,
            "resumed_from": None, "output_dir": "runs/x", "model_path": "runs/x/model.safetensors",
        }  # fmt: skip
        return Summary(**{**values, **changes})


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1000)
