"""One search that any number of worker processes share through a storage: its trials, its segments, its history."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from crossbow_py.core.errors import UserError
from crossbow_py.search.hyperband import Outcome, Segment, TrialState
from crossbow_py.search.identity import upgraded
from crossbow_py.search.space import Space
from crossbow_py.search.study.claims import SegmentClaims, SegmentResult
from crossbow_py.search.study.sampling import Sampling
from crossbow_py.search.study.storage import (
    BadStorageError,
    Patience,
    close_connections,
    id_of,
    open_storage,
    shown_address,
    silence_optuna,
)

_STEPS_PER_EPOCH = 1000  # Optuna's steps are integers, and rungs are measured at fractions of epochs
_CONCLUDED = {
    TrialState.COMPLETE: OptunaState.COMPLETE,
    TrialState.PRUNED: OptunaState.PRUNED,
    TrialState.FAILED: OptunaState.FAIL,
}


class SharedStudy(SegmentClaims):
    """A search in a storage, as one worker process sees it: the claims of its segments, and its trials.

    It keeps two studies of Optuna's: `name`, with the trials as Optuna and its dashboard know them, and
    `name/segments`, with the claims and the results, by which everything is decided. A trial's number is its user
    attribute `trial`; Optuna's own number of it may be another.

    Args:
        storage: an address for `open_storage`, or one of Optuna's storages.
        name: the name of the search in the storage.
        seed: the seed of sampling.
        maximize: whether greater values are better.
        worker: the name of this process for people.
        lease_s: how long after its last sign of life, one every third of it, other hosts take this worker for dead.
        clock: monotonic seconds of this host.
        sleep: waits for some seconds.

    Raises (all methods):
        StorageError: the storage could not be used for some seconds. What was finished is in it.
        BadStorageError: it holds what no worker of this search has written, such as a parameter that is not searched.
    """

    def __init__(
        self, storage: BaseStorage | str, name: str, *, sampler: str, space: Space, seed: int, maximize: bool,
        worker: str, lease_s: float, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        silence_optuna()
        self._name, self._space = name, space
        self._sampling = Sampling(space, sampler, seed, maximize)  # a mistake is found before a storage is opened
        patience = Patience(shown_address(storage) if isinstance(storage, str) else type(storage).__name__, sleep)
        storage = open_storage(storage, sleep) if isinstance(storage, str) else storage
        self._trials: dict[int, FrozenTrial] = {}
        self._one_samples = threading.Lock()  # taken before the lock of the claims, never while that is held
        self._study, claims = (_study_named(each, storage, patience, maximize) for each in (name, f"{name}/segments"))
        super().__init__(storage, claims, patience, worker, lease_s, clock)

    def close(self) -> None:
        super().close()
        close_connections(self._storage)

    def exists(self) -> bool:
        """Return whether any worker has opened the search."""
        with self._lock:
            return bool(self._kept_identities())

    def open(self, identity: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """Create the search, or join the one that is there.

        Args:
            identity: plain values that are the same for all of its workers, now and later.
            defaults: of keys that a search lacks which an earlier version began.

        Raises:
            UserError: the storage holds another search of that name.
        """
        with self._lock:
            ours = json.loads(json.dumps(identity))
            agreed = upgraded(self._agreed_identity(ours), defaults or {})
            foreign = [record.number for record in self._all_records() if "trial" not in record.user_attrs]
            difference = f"its trial {foreign[0]} is of another program" if foreign else _first_difference(agreed, ours)
            if difference:
                raise UserError(
                    f"storage: {self._address} holds another search named {self._name!r}: {difference}; go on "
                    "with its settings, or give another study or storage."
                )
            self._records()  # refused before anything is trained

    # --- trials -------------------------------------------------------------------------------------------------------

    def params(self, trial: int) -> dict[str, Any]:
        """Return a trial's parameters by key: sampled when any worker first asks, and the same for all from then on."""
        return dict(self._registered(trial).params)

    def sampled(self) -> dict[int, dict[str, Any]]:
        """Return the parameters of all trials that have been sampled by any worker, by trial."""
        with self._lock:
            self._trials = _first_by_trial(self._records())
            return {trial: dict(self._trials[trial].params) for trial in sorted(self._trials)}

    def conclude(self, trial: int, state: TrialState, value: Outcome) -> None:
        """Tell Optuna how a trial ended, unless that has been told.

        Args:
            trial: one whose parameters were asked for.
            state: COMPLETE, PRUNED or FAILED.
            value: its last; None when it has none.
        """
        key = id_of(self._registered(trial))
        with self._lock, suppress(UpdateFinishedTrialError):
            record = self._patience.call(self._storage.get_trial, key)
            if record.state.is_finished():
                return
            for segment, result in self.segment_results().items():
                if segment.trial == trial:
                    self._report(record, result)
            values = [value] if value is not None and state is not TrialState.FAILED else None
            self._end(key, _CONCLUDED[state], values)

    # --- segments -----------------------------------------------------------------------------------------------------

    def finish(
        self, segment: Segment, value: float, *, epochs: float, seconds: float,
        attrs: Mapping[str, Any] | None = None,
    ) -> bool:  # fmt: skip
        """Keep a segment's value; one that is not finite is the failure of the trial.

        Args:
            segment: one that was claimed.
            value: measured at its rung, after so many `epochs` of the trial.
            seconds: the time that the segment took.
            attrs: plain values to keep with it.

        Returns:
            False when the segment is held no more: another worker took it, whose result then counts.
        """
        if not math.isfinite(value):
            return self.fail(segment, f"its value at {epochs:g} epochs is {value}")
        result = SegmentResult(value, None, epochs, seconds, attrs=attrs or {})
        with self._lock:
            counts = self._keep(segment, result)
        if counts:
            record = self._registered(segment.trial)
            with self._lock, suppress(UpdateFinishedTrialError):  # concluded by another worker, which reported it
                self._report(record, result)
        return counts

    # --- records ------------------------------------------------------------------------------------------------------

    def _report(self, record: FrozenTrial, result: SegmentResult) -> None:
        key = id_of(record)
        if result.reason is not None:
            self._patience.call(self._storage.set_trial_user_attr, key, "reason", result.reason)
        elif result.value is not None:
            step = round(result.epochs * _STEPS_PER_EPOCH)
            if step not in record.intermediate_values:
                self._patience.call(self._storage.set_trial_intermediate_value, key, step, result.value)

    def _registered(self, trial: int) -> FrozenTrial:
        """Return the trial's record, created if there is none. Of two that were created at once the first counts.

        The lock is not to be held: a sampler may take longer than a lease, which is prolonged meanwhile.
        """
        with self._one_samples:
            with self._lock:
                if trial not in self._trials:
                    self._trials = _first_by_trial(self._records())
                if trial in self._trials:
                    return self._trials[trial]
                history = [self._trials[each] for each in sorted(self._trials)]
            record = self._sampling.sampled(trial, history)
            with self._lock:
                self._patience.call(self._storage.create_new_trial, self._study, record)
                records = self._records()
                self._trials = _first_by_trial(records)
                for late in records:
                    if late.user_attrs["trial"] == trial and late.number != self._trials[trial].number:
                        self._end(id_of(late))
                return self._trials[trial]

    def _records(self) -> list[FrozenTrial]:
        """Return all trials, each with parameters that this search may give one.

        Parameters become a configuration, which may name code to call; and who can write to the storage is not who
        searches. Raises BadStorageError.
        """
        records = self._all_records()
        for record in records:
            trial = record.user_attrs.get("trial")
            if type(trial) is not int or trial < 0:
                raise BadStorageError(self._address, f"its trial {record.number} is of another program")
            mistake = self._space.mistake_in(record.params)
            if mistake:
                raise BadStorageError(self._address, f"trial {trial} has {mistake}")
        return records

    def _all_records(self) -> list[FrozenTrial]:
        records = self._patience.call(self._storage.get_all_trials, self._study, deepcopy=False)
        for record in records:
            if not isinstance(record.user_attrs, dict):
                raise BadStorageError(self._address, f"its trial {record.number} has attributes that are no mapping")
        return records


def _study_named(name: str, storage: BaseStorage, patience: Patience, maximize: bool) -> int:
    """Return the number of one of Optuna's studies, which is created if there is none of that name."""

    def known() -> int | None:
        with suppress(KeyError):
            return storage.get_study_id_from_name(name)
        return None

    study = patience.call(known)
    if study is not None:
        return study
    direction = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
    with suppress(DuplicatedStudyError):  # by another worker just now, or by a call of ours that seemed to fail
        return patience.call(storage.create_new_study, [direction], name)
    return patience.call(storage.get_study_id_from_name, name)


def _first_by_trial(records: Collection[FrozenTrial]) -> dict[int, FrozenTrial]:
    found: dict[int, FrozenTrial] = {}
    for record in records:
        found.setdefault(record.user_attrs["trial"], record)
    return found


def _first_difference(theirs: Any, ours: Any, key: str = "") -> str:
    """Return in words where two trees of plain values differ; empty if they do not."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for each in sorted({*theirs, *ours}):
            found = _first_difference(theirs.get(each), ours.get(each), f"{key}.{each}" if key else each)
            if found:
                return found
        return ""
    return "" if theirs == ours else f"{key} is {json.dumps(theirs)} there and {json.dumps(ours)} here"
