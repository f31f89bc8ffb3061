"""Small searches in a storage, for one process that plays several workers, and a storage that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage

from crossbow_py.search.hyperband import Segment
from crossbow_py.search.space import Space
from crossbow_py.search.study.storage import close_connections, open_storage
from crossbow_py.search.study.study import SharedStudy

SPACE = Space.from_mapping({"rate": {"low": 0.001, "high": 0.5, "log": True, "num": 4}, "rule": ["sgd", "adam"]})
SEGMENTS = [Segment(trial, 0) for trial in range(6)]
IDENTITY = {"metric": "accuracy", "space": {"rate": {"low": 0.001}}}
OPENED: list[SharedStudy] = []  # by `worker`; a fixture closes them


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def worker(
    storage: BaseStorage | str,
    name: str = "w",
    clock: Callable[[], float] | None = None,
    sampler: str = "random",
    lease_s: float = 10.0,
) -> SharedStudy:
    study = SharedStudy(
        storage, "mine", sampler=sampler, space=SPACE, seed=3, maximize=True, worker=name, lease_s=lease_s,
        clock=clock or Clock(), sleep=lambda _: None,
    )  # fmt: skip
    OPENED.append(study)
    study.open(IDENTITY)
    return study


def done(study: SharedStudy, segment: Segment, value: float = 0.5) -> bool:
    return study.finish(segment, value, epochs=1.0, seconds=2.0)


def why_failed(study: SharedStudy) -> dict[int, str]:
    """Why trials failed, by trial."""
    found = study.segment_results().items()
    return {segment.trial: result.reason for segment, result in found if result.reason is not None}


def optuna_trials(storage: BaseStorage | str) -> list[optuna.trial.FrozenTrial]:
    opened = open_storage(storage) if isinstance(storage, str) else storage
    found = opened.get_all_trials(opened.get_study_id_from_name("mine"))
    close_connections(opened)
    return found


class Failing(InMemoryStorage):
    """Fails every call now and then: before it is done, or, which is worse, after."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.every, self.is_after, self.is_inside = 0, 0, False, False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        of_self = super().__getattribute__
        if not name.startswith(("get_", "set_", "create_new")) or not of_self("every") or of_self("is_inside"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            fails = self.calls % self.every == 0
            if fails and not self.is_after:
                raise StorageInternalError("locked")
            self.is_inside = True
            try:
                value = found(*args, **kwargs)
            finally:
                self.is_inside = False
            if fails:
                raise StorageInternalError("locked")
            return value

        return call
