"""The claims of worker processes on segments, and their leases, kept beside a search's trials in the same storage.

Every claim is one Optuna trial of a second study. Optuna's storages guarantee two atomic operations: to create a trial
with the next number, and to finish a trial that is not finished. The rest follows from these two:

- a segment is held by the lowest-numbered of its claims that have not ended; a worker whose claim is another is late;
- a claim that is COMPLETE is the segment's result, one that ended otherwise (FAIL) was given back or taken away;
- a claim whose holder's lease is over may be ended by anyone. Only one wins, the holder that finishes or another that
  takes it away, so no segment has two results.

The search's identity is agreed on in the same way: the lowest-numbered record of one counts.
"""

from __future__ import annotations

import math
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from crossbow_py.cli.launchers.ray_worker import boot_id
from crossbow_py.core.errors import UserError, text_of
from crossbow_py.core.settings import check
from crossbow_py.search.hyperband import Outcome, Segment
from crossbow_py.search.study.storage import BadStorageError, Patience, id_of

_LATE = 0.1  # of a lease: how much later it ends for others, for clocks whose rates differ
_RENEWED_AFTER = 1 / 3  # of a lease
_LEASE_OF = "lease of "  # a holder: the attribute of the study
_T = TypeVar("_T")


@dataclass(frozen=True)
class Lease:
    """One worker's hold on all that it claimed, as its holder wrote it last.

    It holds no time, as hosts' clocks differ: the holder changes the beat every third of `lease_s`, and others see by
    their own clocks for how long it stays the same, see `LeaseWatch`. On the worker's own host it ends with its
    process: a search that was killed there goes on at once.

    Attributes:
        beat: another number each time that the holder writes.
        lease_s: how long a beat holds; 0 where the holder gave the lease up.
        host: where its process numbers mean something; empty where that cannot be told.
        process: number of its process.
        started: when that was started, in the kernel's ticks: numbers are used again.
    """

    beat: float
    lease_s: float
    host: str
    process: int
    started: str

    @classmethod
    def of_this_process(cls, beat: float, lease_s: float) -> Lease:
        """Return a lease of this process."""
        return cls(beat, lease_s, _host(), os.getpid(), _started(os.getpid()))

    @classmethod
    def read(cls, plain: Any) -> Lease:
        """Return a lease from a storage. Raises UserError or TypeError for what no worker has written."""
        if "until" in plain:  # the golden search of an earlier version, whose end of a lease changed as a beat does
            plain = {"beat": plain["until"], **{key: value for key, value in plain.items() if key != "until"}}
        return _parsed(cls, plain)

    @property
    def is_here(self) -> bool:
        """True if its process runs on this host, in any container."""
        return self.host.partition(" ")[0] == _host().partition(" ")[0]

    @property
    def has_ended(self) -> bool:
        """True if it is known to be over: given up, or of a process of this host that has ended."""
        is_gone = bool(self.host) and self.host == _host() and _started(self.process) != self.started
        return self.lease_s == 0 or is_gone


class LeaseWatch:
    """Tells which leases live, by the clock of the watching process: one ends when its beat stays the same too long.

    A lease that is seen for the first time lives: how old its beat is cannot be told. A tenth is added to each, as
    clocks of two hosts may run at different rates. A process may be stopped, or a storage slow, while it reads leases:
    so a beat counts as heard when the reading was over, and as silent only until the reading began.
    """

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, float]] = {}  # by holder: the beat, and when it was heard first

    def living(self, leases: Mapping[str, Lease], begun_s: float, read_s: float) -> dict[str, Lease]:
        """Return the leases that live; reading them began at `begun_s` and was over at `read_s` of one clock."""
        heard = {}
        for holder, lease in leases.items():
            beat, since_s = self._heard.get(holder, (lease.beat, read_s))
            heard[holder] = (lease.beat, since_s if beat == lease.beat else read_s)
        self._heard = heard
        return {
            holder: lease
            for holder, lease in leases.items()
            if not lease.has_ended and begun_s - heard[holder][1] < (1 + _LATE) * lease.lease_s
        }


def _host() -> str:
    """Return the running kernel, its space of process numbers (containers have their own), and the user."""
    boot = boot_id()
    with suppress(OSError):
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}" if boot else ""
    return ""


def _started(process: int) -> str:
    """Return when the process was started; empty if it has ended, even if nobody has waited for it yet."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in ("Z", "X") else fields[18]
    return ""


@dataclass(frozen=True)
class SegmentResult:
    """The result of a segment.

    Attributes:
        value: None when the trial failed in it.
        reason: why it failed.
        epochs: those that the trial had been trained for when it was measured; 0 if it failed.
        seconds: the time that the segment took; 0 if it failed.
        worker: the worker that trained it.
        attrs: other plain values to keep.
    """

    value: Outcome
    reason: str | None = None
    epochs: float = 0.0
    seconds: float = 0.0
    worker: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Claim:
    """A claim as the storage has it."""

    number: int
    id: int
    segment: Segment
    holder: str
    has_ended: bool
    result: SegmentResult | None

    @classmethod
    def read(cls, trial: FrozenTrial) -> _Claim:
        """Raises UserError, LookupError or TypeError for what no worker has written."""
        kept = trial.user_attrs
        result = _parsed(SegmentResult, kept["result"]) if trial.state is TrialState.COMPLETE else None
        segment = _parsed(Segment, {"trial": kept["trial"], "rung": kept["rung"]})
        if min(segment.trial, segment.rung) < 0:
            raise LookupError(f"there is no segment {segment}")
        holder = str(kept["holder"])
        return cls(trial.number, id_of(trial), segment, holder, trial.state.is_finished(), result)


class SegmentClaims:
    """The claims of one search on its segments, as one worker sees and makes them.

    Any thread may call it; calls wait for each other. While segments are held a thread prolongs the lease on them, so
    that this process may be busy for as long as it takes; close it.

    Args:
        storage, study: Optuna's storage, and in it the number of a study that holds nothing else.
        patience: calls the storage.
        worker: names this worker to the others.
        lease_s: seconds until others may take what it holds, if it does not prolong its lease.
        clock: monotonic seconds of this host.
    """

    def __init__(
        self, storage: BaseStorage, study: int, patience: Patience, worker: str, lease_s: float,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._storage, self._claims_study, self._patience, self._address = storage, study, patience, patience.address
        self._worker, self._lease_s, self._clock = worker, lease_s, clock
        self._held: dict[Segment, int] = {}
        self._ended: dict[int, _Claim] = {}  # by their numbers in the storage, which keeps them as they are
        self._lost: set[Segment] = set()  # since the last `renew`
        self._watch = LeaseWatch()
        self._holder, self._beat, self._until_s = "", 0, -math.inf
        self._lock = threading.RLock()
        self._heartbeat = Heartbeat(self._prolong_held, self._lock, lease_s / 3)

    def close(self) -> None:
        """End the thread that prolongs the lease. Raises nothing, and gives nothing back; all may still be read.

        What is held is free for others once the lease, or this process, has ended; `release` it before.
        """
        self._heartbeat.close()

    @property
    def held(self) -> tuple[Segment, ...]:
        """The segments that this worker holds, as far as it knows."""
        with self._lock:
            return tuple(sorted(self._held))

    def claim(self, segments: Collection[Segment]) -> list[Segment]:
        """Take those of the segments that nobody holds and that have no result yet; returned in the order given.

        No segment is held by two workers that live, as long as their leases are prolonged in time; one whose holder
        has ended may be taken.
        """
        with self._lock:
            if not segments:
                return []
            self._prolong()
            claimed = self._claim(segments)
            if claimed:
                self._heartbeat.start()
            return claimed

    def free(self, segments: Collection[Segment]) -> list[Segment]:
        """Return the segments that `claim` would take now."""
        with self._lock:
            return self._free(segments, self._read()) if segments else []

    def join(self) -> None:
        """Take a lease, by which others count this worker from now on: what is left is shared with it."""
        with self._lock:
            self._prolong()

    def renew(self) -> list[Segment]:
        """Prolong the lease on what is held, if that is due, and hear what became of it meanwhile; cheap.

        Returns:
            What others have taken since the last call, whatever found that out: held no longer.

        Raises:
            Exception: what the thread that prolongs the lease met when it last tried.
        """
        with self._lock:
            self._heartbeat.raise_error()
            self._prolong()
            lost, self._lost = sorted(self._lost), set()
            return lost

    def fail(self, segment: Segment, reason: str) -> bool:
        """Keep that a trial failed in a segment. Returns False if it is not held, or another worker took it."""
        with self._lock:
            return self._keep(segment, SegmentResult(None, reason))

    def release(self, segment: Segment) -> None:
        """Give a segment back, unfinished, if it is held."""
        with self._lock:
            if segment in self._held:
                self._end(self._held[segment])
                del self._held[segment]

    def num_searchers(self, *, here: bool = False) -> int:
        """Return the number of search processes that live, this one included; those of this host alone where `here`.

        One whose lease is seen for the first time counts until its beat has stayed the same for too long.
        """
        with self._lock:
            living = self._living()
            others = {holder for holder, lease in living.items() if lease.is_here or not here}
            return len(others | {self._holder})

    def leave(self) -> None:
        """End the lease, as this process takes nothing more: the others share what is left."""
        with self._lock:
            self._give_up_lease()
            self._held = {}

    def segment_results(self) -> dict[Segment, SegmentResult]:
        """Return the results of the segments that are over, ascending."""
        with self._lock:
            return _results(self._read())

    def results(self) -> dict[Segment, Outcome]:
        """Return the values of the segments that are over, ascending."""
        return {segment: result.value for segment, result in self.segment_results().items()}

    # The lock is held in what follows.

    def _kept_identities(self) -> list[Mapping[str, Any]]:
        """Return the identities that workers have written, the first of which counts."""
        trials = self._patience.call(self._storage.get_all_trials, self._claims_study, deepcopy=False)
        with self._of_a_search("identity"):
            return [trial.user_attrs["identity"] for trial in trials if "identity" in trial.user_attrs]

    def _agreed_identity(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Return the identity of the search that is kept here: the given one (plain values) if there was none."""
        for _ in range(2):
            if kept := self._kept_identities():
                break
            record = create_trial(state=TrialState.FAIL, user_attrs={"identity": dict(identity)})
            self._patience.call(self._storage.create_new_trial, self._claims_study, record)
        with self._of_a_search("identity"):
            return dict(kept[0])

    def _claim(self, segments: Collection[Segment]) -> list[Segment]:
        free = self._free(segments, self._read())
        for segment in free:
            attributes = {"trial": segment.trial, "rung": segment.rung, "holder": self._holder}
            claim = create_trial(state=TrialState.RUNNING, user_attrs=attributes)
            self._patience.call(self._storage.create_new_trial, self._claims_study, claim)
        return self._settled(free) if free else []

    def _prolong_held(self) -> None:
        if self._held:
            self._prolong()

    def _prolong(self) -> None:
        """Prolong the lease when a third of it has passed; a lease that had ended is given up.

        Others may be taking what it held: what nobody has taken is claimed anew.
        """
        now = self._clock()
        if now < self._until_s - (1 - _RENEWED_AFTER) * self._lease_s:
            return
        if now < self._until_s:
            self._take_lease(now)
            ended = {claim.id for claim in self._read() if claim.has_ended}
            lost = {segment for segment, claim in self._held.items() if claim in ended}
            self._lost |= lost
            self._held = {segment: claim for segment, claim in self._held.items() if segment not in lost}
            return
        held = self.held
        self._lost.update(held)  # until they are claimed anew: the storage may fail before that
        for segment in held:
            self.release(segment)
        self._give_up_lease()  # so that nobody waits for it
        self._holder = f"{self._worker} {uuid.uuid4().hex[:12]}"
        self._take_lease(now)
        if held:
            self._claim(held)

    def _keep(self, segment: Segment, result: SegmentResult) -> bool:
        """Save a segment's result. Returns False if it is not held, or another worker took it, whose result counts."""
        claim = self._held.get(segment)
        if claim is None:
            return False
        kept = {**asdict(result), "worker": self._worker}
        values = None if result.value is None else [result.value]
        with suppress(UpdateFinishedTrialError):  # by another; or by a call of ours that seemed to fail
            self._patience.call(self._storage.set_trial_user_attr, claim, "result", kept)
            self._patience.call(self._storage.set_trial_state_values, claim, TrialState.COMPLETE, values)
        is_ours = self._patience.call(self._storage.get_trial, claim).state is TrialState.COMPLETE
        del self._held[segment]
        return is_ours

    def _free(self, segments: Iterable[Segment], claims: Sequence[_Claim]) -> list[Segment]:
        """Return the segments that may be taken, after ending the claims of ended leases on them."""
        living = self._living()
        results, by_segment = _results(claims), _unfinished(claims)
        free = []
        for segment in segments:
            if segment in results or segment in self._held:
                continue
            standing = by_segment.get(segment, [])
            # Our own that is not held is left from a call that failed midway.
            over = [each for each in standing if each.holder == self._holder or each.holder not in living]
            for each in over:
                self._end(each.id)
            if len(over) == len(standing):
                free.append(segment)
        return free

    def _settled(self, claimed: Iterable[Segment]) -> list[Segment]:
        """Return the segments on which our claim is the first, and end our other claims on them."""
        claims = self._read()
        results, by_segment = _results(claims), _unfinished(claims)
        won = []
        for segment in claimed:
            standing = by_segment.get(segment, [])
            is_ours = segment not in results and bool(standing) and standing[0].holder == self._holder
            if is_ours:
                self._held[segment] = standing[0].id
                self._lost.discard(segment)
                won.append(segment)
            for each in standing[1 if is_ours else 0 :]:
                if each.holder == self._holder:
                    self._end(each.id)
        return won

    def _end(self, record: int, state: TrialState = TrialState.FAIL, values: list[float] | None = None) -> None:
        with suppress(UpdateFinishedTrialError):  # by its holder, or by another who takes it away
            self._patience.call(self._storage.set_trial_state_values, record, state, values)

    def _take_lease(self, now: float) -> None:
        self._beat += 1
        self._write_lease(Lease.of_this_process(self._beat, self._lease_s))
        self._until_s = now + self._lease_s  # from before it was written: others hear of it later

    def _give_up_lease(self) -> None:
        if self._holder:
            self._write_lease(Lease.of_this_process(self._beat, 0.0))
        self._holder, self._until_s = "", -math.inf

    def _write_lease(self, lease: Lease) -> None:
        key = f"{_LEASE_OF}{self._holder}"
        self._patience.call(self._storage.set_study_user_attr, self._claims_study, key, asdict(lease))

    def _living(self) -> dict[str, Lease]:
        """Return the leases that live, by holder."""
        begun_s = self._clock()
        kept = self._patience.call(self._storage.get_study_user_attrs, self._claims_study)
        read_s = self._clock()
        with self._of_a_search("lease"):
            leases = {
                key.removeprefix(_LEASE_OF): Lease.read(plain)
                for key, plain in kept.items()
                if key.startswith(_LEASE_OF)
            }
        return self._watch.living(leases, begun_s, read_s)

    def _read(self) -> list[_Claim]:
        trials = self._patience.call(self._storage.get_all_trials, self._claims_study, deepcopy=False)
        with self._of_a_search("claim"):
            return [self._claim_of(trial) for trial in trials if "holder" in trial.user_attrs]

    def _claim_of(self, trial: FrozenTrial) -> _Claim:
        claim = self._ended.get(id_of(trial)) or _Claim.read(trial)
        if claim.has_ended:
            self._ended[claim.id] = claim
        return claim

    @contextmanager
    def _of_a_search(self, kind: str) -> Iterator[None]:
        """Raise BadStorageError if the block finds values in the storage that no search has written."""
        try:
            yield
        except (UserError, LookupError, TypeError, ValueError) as error:
            raise BadStorageError(self._address, f"a {kind} is damaged ({text_of(error)[:200]})") from error


def _parsed(kind: type[_T], plain: Any) -> _T:
    """Return an object of plain values, each of its field's type. Raises UserError and TypeError."""
    found = kind(**plain)
    check(found)
    return found


def _results(claims: Iterable[_Claim]) -> dict[Segment, SegmentResult]:
    found: dict[Segment, SegmentResult] = {}
    for claim in claims:
        if claim.result is not None:
            found.setdefault(claim.segment, claim.result)
    return dict(sorted(found.items()))


def _unfinished(claims: Iterable[_Claim]) -> dict[Segment, list[_Claim]]:
    """Return the claims that have not ended, by segment, in the order in which they were made."""
    found: dict[Segment, list[_Claim]] = {}
    for claim in claims:
        if not claim.has_ended:
            found.setdefault(claim.segment, []).append(claim)
    return found


class Heartbeat:
    """Calls `beat` every so often in a thread, from `start` until `close`. The thread is a daemon.

    Args:
        beat: called with the lock held. What it raises is kept, and the next beat tries again.
        lock: guards what the beat touches; one that its holder may take again.
        every_s: seconds between beats, real ones.
    """

    def __init__(self, beat: Callable[[], None], lock: AbstractContextManager[bool], every_s: float) -> None:
        self._beat, self._lock, self._every_s = beat, lock, every_s
        self._ended = threading.Event()  # each thread has its own
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._ended,), name="heartbeat", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread after a beat that is under way. Raises nothing. The lock must not be held."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._ended.set()
        if thread is not None:
            thread.join()

    def raise_error(self) -> None:
        """Raise what the last beat raised, once."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(self._every_s):
            with self._lock:
                if ended.is_set():
                    return
                try:
                    self._beat()
                    self._error = None
                except Exception as error:  # for the thread that uses this; here nobody would see it
                    self._error = error
