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
from crossbow_py.search.study.claims import Heartbeat, SegmentClaims, SegmentResult
from crossbow_py.search.study.sampling import SamplerName, Sampling
from crossbow_py.search.study.storage import BadStorageError, Patience, open_storage, shown_address, silence_optuna

_STEPS_PER_EPOCH = 1000  # Optuna's steps are integers, and rungs are measured at fractions of epochs
_CONCLUDED = {
    TrialState.COMPLETE: OptunaState.COMPLETE,
    TrialState.PRUNED: OptunaState.PRUNED,
    TrialState.FAILED: OptunaState.FAIL,
}


class SharedStudy:
    """A search in a storage, as one worker process sees it. Any thread may call it; calls wait for each other.

    It keeps two studies of Optuna's: `name`, with the trials as Optuna and its dashboard know them, and
    `name/segments`, with the claims and the results, by which everything is decided. A trial's number is its user
    attribute `trial`; Optuna's own number of it may be another.

    While segments are held a thread prolongs the lease on them, so that this process may be busy for as long as it
    takes; close it.

    Args:
        storage: an address for `open_storage`, or one of Optuna's storages.
        name: the name of the search in the storage.
        sampler: how trials are sampled.
        space: the search space.
        seed: the seed of sampling.
        maximize: whether greater values are better.
        worker: the name of this process for people.
        lease_s: how long after its last sign of life, one every third of it, other hosts take this worker for dead.
        clock: seconds since 1970; of all hosts the same to within a tenth of `lease_s`.
        sleep: waits for some seconds.

    Raises (all methods):
        StorageError: the storage could not be used for some seconds. What was finished is in it.
        BadStorageError: it holds what no worker of this search has written, such as a parameter that is not searched.
    """

    def __init__(
        self, storage: BaseStorage | str, name: str, *, sampler: SamplerName, space: Space, seed: int, maximize: bool,
        worker: str, lease_s: float, clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        silence_optuna()
        self._storage = open_storage(storage, sleep) if isinstance(storage, str) else storage
        self._address = shown_address(storage) if isinstance(storage, str) else type(storage).__name__
        self._patience = Patience(self._address, sleep)
        self._name, self._maximize = name, maximize
        self._space = space
        self._sampling = Sampling(space, sampler, seed, maximize)
        self._lock = threading.RLock()
        self._trials: dict[int, FrozenTrial] = {}
        self._study = self._study_named(name)
        claims = self._study_named(f"{name}/segments")
        self._claims = SegmentClaims(self._storage, claims, self._patience, self._address, worker, lease_s, clock)
        self._heartbeat = Heartbeat(self._claims.prolong, lambda: bool(self._claims.held), self._lock, lease_s / 3)

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
            agreed = upgraded(self._claims.agreed_identity(ours), defaults or {})
            difference = self._foreign() or _first_difference(agreed, ours)
            if difference:
                raise UserError(
                    f"storage: {self._address} holds another search named {self._name!r}: {difference}; go on "
                    "with its settings, or give another study or storage."
                )
            self._records()  # refused before anything is trained

    def close(self) -> None:
        """End the thread that prolongs the lease. Raises nothing, and gives nothing back; the study may still be read.

        What is held is free for others once the lease, or this process, has ended; `release` it before.
        """
        self._heartbeat.close()

    # --- trials -------------------------------------------------------------------------------------------------------

    def params(self, trial: int) -> dict[str, Any]:
        """Return a trial's parameters by key: sampled when any worker first asks, and the same for all from then on."""
        with self._lock:
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
        with self._lock, suppress(UpdateFinishedTrialError):
            record = self._patience.call(self._storage.get_trial, self._registered(trial)._trial_id)
            if record.state.is_finished():
                return
            for segment, result in self._claims.results().items():
                if segment.trial == trial:
                    self._report(record, result)
            values = [value] if value is not None and state is not TrialState.FAILED else None
            self._end(record, _CONCLUDED[state], values)

    # --- segments -----------------------------------------------------------------------------------------------------

    @property
    def held(self) -> tuple[Segment, ...]:
        """The segments that this worker holds, as far as it knows."""
        with self._lock:
            return self._claims.held

    def claim(self, segments: Collection[Segment]) -> list[Segment]:
        """Take segments to train; those that are returned are this worker's, in the order given.

        No segment is held by two workers that live, as long as their leases are prolonged in time; one whose holder
        has ended may be taken.
        """
        with self._lock:
            claimed = self._claims.claim(segments)
            if claimed:
                self._heartbeat.start()
            return claimed

    def free(self, segments: Collection[Segment]) -> list[Segment]:
        """Return the segments that nobody holds and that have no result yet, in the order given."""
        with self._lock:
            return self._claims.free(segments)

    def renew(self) -> list[Segment]:
        """Prolong the lease on what is held, when that is due, and hear what became of it meanwhile; cheap.

        Returns:
            Segments that others have taken since the last call, as the lease had ended: they are held no longer.

        Raises:
            Exception: what the thread that prolongs the lease met when it last tried.
        """
        with self._lock:
            self._heartbeat.raise_error()
            return self._claims.renew()

    def finish(
        self, segment: Segment, value: float, *, epochs: float, seconds: float,
        attrs: Mapping[str, Any] | None = None,
    ) -> bool:  # fmt: skip
        """Keep a segment's value; one that is not finite is the failure of the trial.

        Args:
            segment: one that was claimed.
            value: measured at its rung.
            epochs: the epochs that the trial has been trained for.
            seconds: the time that the segment took.
            attrs: plain values to keep with it.

        Returns:
            False when the segment is held no more: another worker took it, whose result then counts.
        """
        if not math.isfinite(value):
            return self.fail(segment, f"its value at {epochs:g} epochs is {value}")
        result = SegmentResult(value, None, epochs, seconds, attrs=attrs or {})
        with self._lock:
            counts = self._claims.finish(segment, result)
            if counts:
                with suppress(UpdateFinishedTrialError):  # concluded by another worker, which reported it
                    self._report(self._registered(segment.trial), result)
            return counts

    def fail(self, segment: Segment, reason: str) -> bool:
        """Keep that a trial failed in a segment. Returns as `finish` does."""
        with self._lock:
            return self._claims.finish(segment, SegmentResult(None, reason))

    def release(self, segment: Segment) -> None:
        """Give back a segment, unfinished, if it is still held."""
        with self._lock:
            self._claims.release(segment)

    def num_searchers(self, *, here: bool = False) -> int:
        """Return the number of processes that share the search now, this one included; those done or dead do not count.

        Args:
            here: count only those on this host.
        """
        with self._lock:
            return self._claims.num_searchers(here=here)

    def leave(self) -> None:
        """Take nothing more, so that the others share what is left; what is held, `release` before."""
        with self._lock:
            self._claims.leave()

    def segment_results(self) -> dict[Segment, SegmentResult]:
        """Return the results of the segments that are over, ascending."""
        with self._lock:
            return self._claims.results()

    def results(self) -> dict[Segment, Outcome]:
        """Return the values of the segments that are over, ascending."""
        return {segment: result.value for segment, result in self.segment_results().items()}

    # --- records ------------------------------------------------------------------------------------------------------

    def _report(self, record: FrozenTrial, result: SegmentResult) -> None:
        key: int = record._trial_id
        if result.reason is not None:
            self._patience.call(self._storage.set_trial_user_attr, key, "reason", result.reason)
        elif result.value is not None:
            step = round(result.epochs * _STEPS_PER_EPOCH)
            if step not in record.intermediate_values:
                self._patience.call(self._storage.set_trial_intermediate_value, key, step, result.value)

    def _registered(self, trial: int) -> FrozenTrial:
        """Return the trial's record, created if there is none. Of two that were created at once the first counts."""
        if trial not in self._trials:
            self._trials = _first_by_trial(self._records())
        if trial not in self._trials:
            record = self._sampling.sampled(trial, [self._trials[each] for each in sorted(self._trials)])
            self._patience.call(self._storage.create_new_trial, self._study, record)
            records = self._records()
            self._trials = _first_by_trial(records)
            for late in records:
                if late.user_attrs["trial"] == trial and late.number != self._trials[trial].number:
                    self._end(late, OptunaState.FAIL, None)
        return self._trials[trial]

    def _end(self, record: FrozenTrial, state: OptunaState, values: list[float] | None) -> None:
        with suppress(UpdateFinishedTrialError):
            self._patience.call(self._storage.set_trial_state_values, record._trial_id, state, values)

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

    def _foreign(self) -> str:
        """Return a sentence if another program's trials are there; empty if they are ours."""
        numbers = [record.number for record in self._all_records() if "trial" not in record.user_attrs]
        return f"its trial {numbers[0]} is of another program" if numbers else ""

    def _study_named(self, name: str) -> int:
        direction = StudyDirection.MAXIMIZE if self._maximize else StudyDirection.MINIMIZE
        for study in self._patience.call(self._storage.get_all_studies):
            if study.study_name == name:
                return study._study_id
        with suppress(DuplicatedStudyError):  # by another worker just now, or by a call of ours that seemed to fail
            return self._patience.call(self._storage.create_new_study, [direction], name)
        return self._patience.call(self._storage.get_study_id_from_name, name)


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
