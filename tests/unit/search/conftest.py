"""A small search as its listeners are told of it, storages for searches, and tiny searches.

The search has four trials in one bracket, measured at 1, 2 and 4 epochs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from crossbow_py.engine.device import memory
from crossbow_py.packs.width import Width
from crossbow_py.search.events import BestTrial, RunningTrial, SearchInfo, SearchProgress, SearchSummary, TrialRecord
from crossbow_py.search.hyperband import TrialState, make_brackets
from crossbow_py.search.space import Space
from crossbow_py.search.study.storage import open_storage
from tests.unit.search.study.shared_studies import OPENED
from tests.unit.search.tiny_search import Setting

SPACE = Space.from_mapping(
    {
        "optimizer": ["sgd", "adamw"],
        "optimizer.learning_rate": {"low": 0.001, "high": 0.1, "log": True},
        "optimizer.momentum": {"low": 0.0, "high": 0.9, "when": {"optimizer": "sgd"}},
    }
)
BRACKETS = make_brackets("successive_halving", num_trials=4, min_epochs=1, max_epochs=4, eta=2)
PARAMS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "optimizer.learning_rate": 0.001, "optimizer.momentum": 0.0},
    {"optimizer": "sgd", "optimizer.learning_rate": 0.01, "optimizer.momentum": 0.9},
    {"optimizer": "adamw", "optimizer.learning_rate": 0.1},
    {"optimizer": "sgd", "optimizer.learning_rate": 0.05, "optimizer.momentum": 0.45},
]
VALUES: list[dict[float, float]] = [{1.0: 0.5}, {1.0: 0.75, 2.0: 0.8, 4.0: 0.875}, {1.0: 0.625, 2.0: 0.5}, {}]
STATES = (TrialState.PRUNED, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED)


class Searched:
    """Makes what listeners are told; keyword arguments change single fields."""

    @staticmethod
    def info(**changes: Any) -> SearchInfo:
        values: dict[str, Any] = {
            "experiment": "search_digits", "data": "digits", "num_trials": 4, "num_brackets": 1,
            "method": "successive_halving", "sampler": "random", "metric": "validation_accuracy", "maximize": True,
            "max_epochs": 4.0, "device": "cpu", "precision": "fp32", "policy": "signature", "seed": 0,
            "storage": "journal:search.journal", "worker": "host:1", "num_train_samples": 100, "brackets": BRACKETS,
            "space": SPACE,
        }  # fmt: skip
        return SearchInfo(**{**values, **changes})

    @staticmethod
    def trial(number: int, **changes: Any) -> TrialRecord:
        """Trial 0 to 3, as it ended."""
        measured = VALUES[number]
        values: dict[str, Any] = {
            "bracket": 0, "state": STATES[number], "rung": len(measured) - 1 if measured else None,
            "value": measured[max(measured)] if measured else None, "values": measured, "params": PARAMS[number],
            "seconds": 2.0, "worker": "host:1", "reason": None if measured else "ValueError: no such layer",
        }  # fmt: skip
        return TrialRecord(number, **{**values, **changes})

    @classmethod
    def trials(cls) -> tuple[TrialRecord, ...]:
        return tuple(cls.trial(number) for number in range(4))

    @classmethod
    def waiting(cls, number: int) -> TrialRecord:
        """Trial 0 to 3 before anything was measured."""
        return cls.trial(number, state=TrialState.WAITING, rung=None, value=None, values={}, reason=None)

    @staticmethod
    def progress(*running: RunningTrial, **changes: Any) -> SearchProgress:
        values: dict[str, Any] = {
            "num_finished": 3, "num_segments": 7, "images_per_s": 250.0, "elapsed_s": 61.0, "best_trial": 1,
            "best_value": 0.75,
        }  # fmt: skip
        return SearchProgress(running, **{**values, **changes})

    @classmethod
    def best(cls, **changes: Any) -> BestTrial:
        values: dict[str, Any] = {
            "value": 0.875, "epochs": 4.0, "params": PARAMS[1], "seed": 11, "test_accuracy": 0.85, "test_loss": 0.5,
            "model_path": "runs/x/model.safetensors", "command": "python -m crossbow_py.train model=mlp seed=11",
        }  # fmt: skip
        return BestTrial(1, **{**values, **changes})

    @classmethod
    def summary(cls, **changes: Any) -> SearchSummary:
        values: dict[str, Any] = {
            "info": cls.info(output_dir="runs/x"), "status": "finished", "trials": cls.trials(), "best": cls.best(),
            "samples": 800, "loading_time_s": 0.0, "train_time_s": 4.0, "evaluation_time_s": 2.0, "tuning_time_s": 1.0,
            "waiting_time_s": 0.0, "overhead_time_s": 1.0, "wall_time_s": 8.0, "images_per_s": 200.0,
            "versions": {"torch": "2"},
        }  # fmt: skip
        return SearchSummary(**{**values, **changes})


@pytest.fixture
def searched() -> Searched:
    return Searched()


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its tables, which take a second to make."""
    path = tmp_path_factory.mktemp("database") / "a.db"
    open_storage(f"sqlite:///{path}").remove_session()
    return path


@pytest.fixture(params=["journal:{}/a", "sqlite:///{}/a.db"])
def new_address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a storage of either kind, which is not there yet."""
    return str(request.param).format(tmp_path)


@pytest.fixture
def address(new_address: str, database: Path, tmp_path: Path) -> str:
    """Of a storage of either kind, empty."""
    shutil.copy(database, tmp_path / "a.db")
    return new_address


@pytest.fixture
def journal(tmp_path: Path) -> str:
    """The address of an empty journal."""
    return f"journal:{tmp_path}/a"


@pytest.fixture(autouse=True)
def closed_studies() -> Iterator[None]:
    """Ends the threads of the studies of `worker`."""
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Packs of four, unmeasured."""

    def width(trials: Any, limit: int, *_: Any) -> Any:
        return Width(limit, {("serial", 1): 1.0}, "four by four"), []

    monkeypatch.setattr("crossbow_py.packs.trial_registry.measured_width", width)
    return Setting(tmp_path / "trials")


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors mean what they would if packs were on CUDA."""
    is_lost = memory.is_device_lost
    monkeypatch.setattr(memory, "is_device_lost", lambda error, _: is_lost(error, torch.device("cuda")))
