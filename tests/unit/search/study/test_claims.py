"""Segments claimed by workers: each held by one and counted once, whatever is late, lost or killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState as OptunaState

from crossbow_py.search.hyperband import Segment
from crossbow_py.search.study import claims as module
from crossbow_py.search.study.claims import Heartbeat, Lease, LeaseWatch
from crossbow_py.search.study.storage import StorageError, open_storage
from tests.unit.search.study.shared_studies import SEGMENTS, Clock, Failing, done, optuna_trials, why_failed, worker

MANY = [Segment(trial, rung) for trial in range(20) for rung in range(2)]


def test_segments_claimed_by_one_are_not_given_to_another(address: str) -> None:
    first, second = worker(address, "first"), worker(address, "second")
    assert first.claim(SEGMENTS[:4]) == SEGMENTS[:4] == list(first.held)
    assert second.claim(SEGMENTS) == SEGMENTS[4:]
    assert first.claim(SEGMENTS) == []
    assert first.results() == {} == second.results()


def test_segment_finished_is_seen_by_all_and_not_claimed_again(address: str) -> None:
    first, second = worker(address, "first"), worker(address, "second")
    for study in (first, second):
        study.params(2)
    first.claim(SEGMENTS[:3])
    assert first.finish(SEGMENTS[2], 0.25, epochs=1.5, seconds=7.0, attrs={"rows": 3})
    assert first.finish(SEGMENTS[0], float("nan"), epochs=1.5, seconds=7.0) and first.fail(SEGMENTS[1], "raised: x")
    assert first.held == ()
    assert second.results() == {SEGMENTS[0]: None, SEGMENTS[1]: None, SEGMENTS[2]: 0.25}
    assert why_failed(second) == {0: "its value at 1.5 epochs is nan", 1: "raised: x"}
    kept = second.segment_results()[SEGMENTS[2]]
    assert (kept.epochs, kept.seconds, kept.worker, dict(kept.attrs)) == (1.5, 7.0, "first", {"rows": 3})
    assert second.claim(SEGMENTS) == SEGMENTS[3:]
    storage = open_storage(address)
    count = len(storage.get_all_trials(storage.get_study_id_from_name("mine/segments")))
    assert first.claim(SEGMENTS[:3]) == []
    assert len(storage.get_all_trials(storage.get_study_id_from_name("mine/segments"))) == count


def test_segment_of_an_ended_lease_is_claimed_by_another_and_its_late_holder_is_refused(address: str) -> None:
    clock = Clock()
    late, other = worker(address, "late", clock), worker(address, "other", clock)
    late.params(0)
    late.claim(SEGMENTS[:2])
    assert other.free(SEGMENTS[:2]) == []  # from here on it watches
    clock.now += 10.9
    assert other.claim(SEGMENTS[:1]) == []
    clock.now += 0.1
    assert other.claim(SEGMENTS[:1]) == SEGMENTS[:1]
    assert done(late, SEGMENTS[0], 0.1) is False and other.results() == {}
    assert done(other, SEGMENTS[0], 0.9) is True
    assert done(late, SEGMENTS[1], 0.2) is True  # which nobody has taken
    assert late.results() == other.results() == {SEGMENTS[0]: 0.9, SEGMENTS[1]: 0.2}
    assert [trial.intermediate_values for trial in optuna_trials(address)] == [{1000: 0.9}, {1000: 0.2}]


def test_lease_renewed_in_time_is_kept_and_costs_nothing_in_between(journal: str, tmp_path: Path) -> None:
    clock = Clock()
    holder, other = worker(journal, "holder", clock), worker(journal, "other", clock)
    holder.claim(SEGMENTS)
    for _ in range(5):
        clock.now += 3.0
        size = (tmp_path / "a").stat().st_size
        assert holder.renew() == [] and (tmp_path / "a").stat().st_size == size
        clock.now += 3.0
        assert holder.renew() == [] and (tmp_path / "a").stat().st_size > size
        assert other.claim(SEGMENTS) == []


def test_lease_renewed_too_late_keeps_what_nobody_has_taken(address: str) -> None:
    clock = Clock()
    late, other = worker(address, "late", clock), worker(address, "other", clock)
    late.claim(SEGMENTS[:3])
    assert other.free(SEGMENTS[:3]) == []  # from here on it watches
    clock.now += 60.0
    other.claim(SEGMENTS[1:2])
    assert late.renew() == [SEGMENTS[1]] and late.held == (SEGMENTS[0], SEGMENTS[2])
    assert other.claim(SEGMENTS) == SEGMENTS[3:]
    late.params(0)
    assert done(late, SEGMENTS[0])


def test_workers_count_while_their_leases_last_and_until_they_leave(address: str) -> None:
    clock = Clock()
    first, second = worker(address, "first", clock), worker(address, "second", clock)
    first.renew()
    assert (first.num_searchers(), second.num_searchers()) == (1, 2)  # who asks counts too
    second.claim(SEGMENTS[:1])
    assert (first.num_searchers(), second.num_searchers()) == (2, 2)
    clock.now += 5  # half of a lease: it is prolonged
    first.renew()
    clock.now += 8
    assert second.num_searchers() == 2 and first.num_searchers() == 1
    first.leave()
    assert second.num_searchers() == 1
    first.renew()
    assert second.num_searchers() == 2


def test_workers_of_a_host_are_counted_by_the_machine_their_leases_name(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = {"first": "boot pid:[1] 0", "container": "boot pid:[2] 0", "elsewhere": "other pid:[1] 0"}
    clock = Clock()
    studies = [worker(address, name, clock) for name in hosts]
    for study, host in zip(studies, hosts.values(), strict=True):
        monkeypatch.setattr(module, "_host", lambda host=host: host)
        study.renew()
    monkeypatch.setattr(module, "_host", lambda: hosts["first"])
    assert (studies[0].num_searchers(), studies[0].num_searchers(here=True)) == (3, 2)
    studies[1].leave()
    assert (studies[0].num_searchers(), studies[0].num_searchers(here=True)) == (2, 1)


def test_segment_whose_loss_a_claim_found_is_told_by_the_next_renew(journal: str) -> None:
    clock = Clock()
    late, other = worker(journal, "late", clock), worker(journal, "other", clock)
    late.claim(SEGMENTS[:2])
    assert other.free(SEGMENTS[:2]) == []  # from here on it watches
    clock.now += 60.0
    other.claim(SEGMENTS[:1])
    assert late.claim(SEGMENTS[2:3]) == SEGMENTS[2:3]
    late.release(SEGMENTS[0])
    assert done(late, SEGMENTS[0]) is False
    assert late.renew() == SEGMENTS[:1] and late.renew() == []
    assert late.held == (SEGMENTS[1], SEGMENTS[2])


def test_lease_renewed_too_late_in_a_storage_that_fails_is_told_as_a_loss_later(journal: str) -> None:
    clock = Clock()
    late, other = worker(journal, "late", clock), worker(journal, "other", clock)
    late.claim(SEGMENTS[:2])
    clock.now += 60.0

    def fail(*_: object) -> list[Segment]:
        raise StorageError("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late, "_free", fail)
        with pytest.raises(StorageError):
            late.renew()
    assert late.held == () and late.renew() == SEGMENTS[:2]
    assert other.claim(SEGMENTS[:1]) == SEGMENTS[:1] and late.claim(SEGMENTS) == SEGMENTS[1:]


def test_two_that_claim_at_the_same_moment_get_the_first_record_only(journal: str) -> None:
    """The second is forced in between the first's look at what is free and its claim."""
    inner = open_storage(journal)
    second = worker(journal, "second")
    taken: list[list[Segment]] = []

    class Interleaved(type(inner)):  # type: ignore[misc]
        def create_new_trial(self, *args: Any, **kwargs: Any) -> int:
            if "holder" in args[1].user_attrs and not taken:
                taken.append(second.claim(SEGMENTS))
            return int(super().create_new_trial(*args, **kwargs))

    inner.__class__ = Interleaved
    first = worker(inner, "first")
    assert first.claim(SEGMENTS[:3]) == [] and first.held == () and taken == [SEGMENTS]
    claims = inner.get_all_trials(inner.get_study_id_from_name("mine/segments"))
    assert [trial.state for trial in claims[1:]] == [OptunaState.RUNNING] * 6 + [OptunaState.FAIL] * 3
    second.release(SEGMENTS[0])
    assert first.claim(SEGMENTS) == SEGMENTS[:1]


def test_lease_renewed_too_late_is_not_taken_from_under_its_holder(journal: str) -> None:
    """The other saw it ended just before."""
    clock = Clock()
    late = worker(journal, "late", clock)
    late.params(0)
    inner = open_storage(journal)

    class Interleaved(type(inner)):  # type: ignore[misc]
        def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
            found = super().get_study_user_attrs(study_id)
            assert late.renew() == []
            return dict(found)

    other = worker(inner, "other", clock)
    late.claim(SEGMENTS[:2])
    assert other.free(SEGMENTS[:2]) == []  # from here on it watches
    clock.now += 60.0
    inner.__class__ = Interleaved
    assert other.claim(SEGMENTS[:1]) == [] and list(late.held) == SEGMENTS[:2]
    clock.now += 5.0
    assert late.renew() == [] and done(late, SEGMENTS[0])


def test_claim_that_failed_midway_is_made_again(journal: str) -> None:
    study = worker(journal)

    def fail(_: object) -> list[Segment]:
        raise StorageError("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "_settled", fail)
        with pytest.raises(StorageError):
            study.claim(SEGMENTS[:2])
    assert study.held == ()
    assert study.claim(SEGMENTS) == SEGMENTS
    assert worker(journal, "other").claim(SEGMENTS) == []


@pytest.mark.slow
def test_two_processes_share_trials_and_segments_none_twice(new_address: str) -> None:
    first, second = said_by_two_processes(new_address)
    assert first[0] == second[0]
    assert sorted(first[1] + second[1]) == [[each.trial, each.rung] for each in MANY]
    assert worker(new_address, "later", sampler="tpe").results() == {each: each.trial + each.rung / 10 for each in MANY}


def said_by_two_processes(storage: str) -> list[list[Any]]:
    """The parameters and the claims of two that work at once on the segments of MANY."""
    waiting, go = os.pipe()
    reads = [started(storage, name, waiting) for name in ("first", "second")]
    os.write(go, b"..")
    said = []
    for read in reads:
        with open(read, "rb") as file:
            said.append(json.loads(file.read()))
        os.wait()
    os.close(waiting), os.close(go)
    assert all(isinstance(each, list) for each in said), said
    return said


def started(storage: str, name: str, go: int) -> int:
    """The end to read from of a process that works once a byte comes from `go`, and then says what it was given."""
    read, write = os.pipe()
    if not os.fork():
        try:
            os.read(go, 1)
            study = worker(storage, name, sampler="tpe")
            params = [study.params(trial) for trial in range(20)]
            claimed = [segment for each in MANY for segment in study.claim([each])]
            assert all(done(study, each, each.trial + each.rung / 10) for each in claimed)
            said: Any = [params, [[each.trial, each.rung] for each in claimed]]
        except BaseException:
            said = traceback.format_exc()
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    return read


# --- a worker that is busy for long -----------------------------------------------------------------------------------

SHORT_S = 0.03  # a lease that is prolonged every 10 ms, by a clock that stands still meanwhile


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.002)


_OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """What runs before a test is not its own."""
    _OTHERS.clear()
    _OTHERS.update(threading.enumerate())


def heartbeats() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "heartbeat" and thread not in _OTHERS]


def test_lease_of_a_busy_worker_is_prolonged_without_its_help(journal: str, tmp_path: Path) -> None:
    clock = Clock()
    busy, other = worker(journal, "busy", clock, lease_s=SHORT_S), worker(journal, "other", clock, lease_s=SHORT_S)
    busy.claim(SEGMENTS)
    for _ in range(5):
        size = (tmp_path / "a").stat().st_size
        clock.now += SHORT_S * 2 / 3
        until(lambda: (tmp_path / "a").stat().st_size > size)  # noqa: B023
        assert other.claim(SEGMENTS) == []
    assert busy.renew() == [] and busy.held == tuple(SEGMENTS)


def test_worker_that_is_closed_has_no_thread_and_may_still_be_read(journal: str) -> None:
    study = worker(journal)
    study.close()
    study.claim(SEGMENTS[:2])
    done(study, SEGMENTS[0])
    study.close()
    study.close()
    assert heartbeats() == [] and study.held == (SEGMENTS[1],) and study.results() == {SEGMENTS[0]: 0.5}
    assert done(study, SEGMENTS[1])


def test_storage_that_fails_a_busy_workers_thread_is_told_by_the_next_renew() -> None:
    storage, clock = Failing(), Clock()
    study = worker(storage, "busy", clock, lease_s=SHORT_S)
    study.claim(SEGMENTS[:2])
    storage.calls, storage.every = 0, 1
    clock.now += SHORT_S * 2 / 3
    until(lambda: storage.calls >= 9)
    study.close()
    storage.every = 0
    with pytest.raises(StorageError, match="storage Failing cannot be used, tried 9 times: StorageIn"):
        study.renew()
    assert study.renew() == [] and study.held == (SEGMENTS[0], SEGMENTS[1])


def living(watch: LeaseWatch, lease: Lease, now: float) -> bool:
    """Whether the watch takes the lease for a living one, which was read just now."""
    return watch.living({"holder": lease}, now, now) == {"holder": lease}


@pytest.mark.parametrize(("now", "is_over"), [(100.0, False), (110.0, False), (110.9, False), (111.0, True)])
def test_lease_whose_beat_stays_the_same_ends_a_tenth_after_it(now: float, is_over: bool) -> None:
    watch, lease = LeaseWatch(), Lease.of_this_process(1, 10.0)
    assert living(watch, lease, 100.0)
    assert living(watch, lease, now) is not is_over


def test_lease_read_slowly_is_counted_from_when_it_was_heard_to_when_it_was_asked_for() -> None:
    watch, leases = LeaseWatch(), {"holder": Lease.of_this_process(1, 10.0)}
    assert watch.living(leases, 100.0, 107.0) == leases  # written after 100.0, perhaps
    assert watch.living(leases, 117.9, 130.0) == leases  # and prolonged after 117.9
    assert watch.living(leases, 118.0, 130.0) == {}


def test_lease_with_another_beat_is_counted_from_when_that_was_heard() -> None:
    watch = LeaseWatch()
    first, second, third = (Lease.of_this_process(beat, 10.0) for beat in (1, 2, 3))
    assert living(watch, first, 100.0) and living(watch, second, 150.0)
    assert living(watch, second, 160.9) and not living(watch, second, 161.0)
    assert living(watch, third, 162.0)  # it was slow


def test_lease_that_was_given_up_is_over_at_first_sight() -> None:
    assert not living(LeaseWatch(), Lease.of_this_process(1, 0.0), 100.0)


def test_worker_that_joins_watches_an_old_lease_before_it_takes_anything(address: str) -> None:
    clock = Clock()
    worker(address, "silent", clock).claim(SEGMENTS[:1])
    clock.now += 1e6
    new = worker(address, "new", clock)
    assert new.claim(SEGMENTS[:2]) == SEGMENTS[1:2] and new.num_searchers() == 2
    clock.now += 10.9
    assert new.claim(SEGMENTS[:1]) == [] and new.num_searchers() == 2
    clock.now += 0.1
    assert new.num_searchers() == 1 and new.claim(SEGMENTS[:1]) == SEGMENTS[:1]


def test_worker_that_has_joined_is_counted_before_it_claims(address: str) -> None:
    first, second = worker(address, "first"), worker(address, "second")
    second.join()
    assert first.num_searchers() == 2


def test_lease_of_a_killed_process_ends_at_once_also_before_it_is_waited_for() -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, json.dumps(asdict(Lease.of_this_process(1, 10.0))).encode())
        signal.pause()
    lease = Lease(**json.loads(os.read(read, 1000)))
    try:
        assert lease.process == child and not lease.has_ended
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        unwaited = lease.has_ended
        os.waitpid(child, 0)
        os.close(read), os.close(write)
    assert unwaited and lease.has_ended and not living(LeaseWatch(), lease, 100.0)


@pytest.mark.parametrize("host", ["another host", ""])
def test_lease_of_another_host_ends_by_its_beat_only(host: str) -> None:
    watch, lease = LeaseWatch(), replace(Lease.of_this_process(1, 10.0), host=host, process=2**22 + 1)
    assert living(watch, lease, 100.0) and living(watch, lease, 110.9) and not living(watch, lease, 111.0)


def test_containers_of_one_host_are_told_by_the_kernels_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_host", lambda: "boot pid:[1] 0")
    lease = Lease.of_this_process(1, 10.0)
    monkeypatch.setattr(module, "_host", lambda: "boot pid:[2] 0")
    assert lease.is_here and not lease.has_ended  # whose process numbers mean nothing here
    monkeypatch.setattr(module, "_host", lambda: "other pid:[1] 0")
    assert not lease.is_here


def test_heartbeat_closed_in_a_beat_waits_for_it() -> None:
    begun, go, over = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go.wait(30.0)
        over.set()

    heartbeat = Heartbeat(slow, threading.RLock(), 0.005)
    heartbeat.start()
    assert begun.wait(30.0)
    closing = threading.Thread(target=heartbeat.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go.set()
    closing.join(30.0)
    assert not closing.is_alive() and over.is_set() and heartbeats() == []
