"""A search shared by workers: each segment held by one and counted once, whatever is late, lost or killed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.trial import TrialState as OptunaState

from crossbow_py.errors import UserError
from crossbow_py.file_locks import locked
from crossbow_py.packing.hyperband import Segment, TrialState
from crossbow_py.packing.journal import StorageError
from crossbow_py.packing.sampling import SamplerName
from crossbow_py.packing.space import Space
from crossbow_py.packing.storage import open_storage
from crossbow_py.packing.study import SharedStudy

SPACE = Space.from_mapping({"rate": {"low": 0.001, "high": 0.5, "log": True, "num": 4}, "rule": ["sgd", "adam"]})
SEGMENTS = [Segment(trial, 0) for trial in range(6)]
IDENTITY = {"metric": "accuracy", "space": {"rate": {"low": 0.001}}}


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
    sampler: SamplerName = "random",
) -> SharedStudy:
    study = SharedStudy(
        storage, "mine", sampler=sampler, space=SPACE, seed=3, maximize=True, worker=name, lease_s=10.0,
        clock=clock or Clock(), sleep=lambda _: None,
    )  # fmt: skip
    study.open(IDENTITY)
    return study


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its tables, which take a second to make."""
    path = tmp_path_factory.mktemp("database") / "a.db"
    open_storage(f"sqlite:///{path}").remove_session()
    return path


@pytest.fixture(params=["journal:{}/a", "sqlite:///{}/a.db"])
def address(request: pytest.FixtureRequest, database: Path, tmp_path: Path) -> str:
    shutil.copy(database, tmp_path / "a.db")
    return str(request.param).format(tmp_path)


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return f"journal:{tmp_path}/a"


def done(study: SharedStudy, segment: Segment, value: float = 0.5) -> bool:
    return study.finish(segment, value, epochs=1.0, seconds=2.0)


def optuna_trials(storage: BaseStorage | str) -> list[optuna.trial.FrozenTrial]:
    opened = open_storage(storage) if isinstance(storage, str) else storage
    return opened.get_all_trials(opened.get_study_id_from_name("mine"))


# --- claims -----------------------------------------------------------------------------------------------------------


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
    assert second.reasons() == {0: "its value at 1.5 epochs is nan", 1: "raised: x"}
    kept = second.segment_results()[SEGMENTS[2]]
    assert (kept.epochs, kept.seconds, kept.worker, dict(kept.attrs)) == (1.5, 7.0, "first", {"rows": 3})
    assert second.claim(SEGMENTS) == SEGMENTS[3:]
    storage = open_storage(address)
    count = len(storage.get_all_trials(storage.get_study_id_from_name("mine/segments")))
    assert first.claim(SEGMENTS[:3]) == []
    assert len(storage.get_all_trials(storage.get_study_id_from_name("mine/segments"))) == count


def test_segment_released_is_free_at_once(address: str) -> None:
    first, second = worker(address), worker(address)
    first.claim(SEGMENTS)
    first.release(SEGMENTS[1])
    assert second.claim(SEGMENTS) == [SEGMENTS[1]]


def test_segment_of_an_ended_lease_is_claimed_by_another_and_its_late_holder_is_refused(address: str) -> None:
    clock = Clock()
    late, other = worker(address, "late", clock), worker(address, "other", clock)
    late.params(0)
    late.claim(SEGMENTS[:2])
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
    clock.now += 60.0
    other.claim(SEGMENTS[1:2])
    assert late.renew() == [SEGMENTS[1]] and late.held == (SEGMENTS[0], SEGMENTS[2])
    assert other.claim(SEGMENTS) == SEGMENTS[3:]
    late.params(0)
    assert done(late, SEGMENTS[0])


def test_segment_taken_within_a_living_lease_is_told_by_renew(journal: str) -> None:
    """As by a host whose clock is far ahead."""
    clock, ahead = Clock(), Clock()
    holder, other = worker(journal, "holder", clock), worker(journal, "other", ahead)
    holder.claim(SEGMENTS[:2])
    ahead.now += 100.0
    other.claim(SEGMENTS[:1])
    clock.now += 5.0
    assert holder.renew() == SEGMENTS[:1] and holder.held == (SEGMENTS[1],)


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
        patch.setattr(study._claims, "_settled", fail)
        with pytest.raises(StorageError):
            study.claim(SEGMENTS[:2])
    assert study.held == ()
    assert study.claim(SEGMENTS) == SEGMENTS
    assert worker(journal, "other").claim(SEGMENTS) == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_two_threads_that_claim_get_every_segment_once(journal: str, is_shared: bool) -> None:
    segments = [Segment(trial, rung) for trial in range(20) for rung in range(2)]
    storage = open_storage(journal)
    studies = [worker(storage if is_shared else journal, f"w{index}") for index in range(2)]
    begin = threading.Barrier(2)
    claimed: list[list[Segment]] = [[], []]

    def run(index: int) -> None:
        begin.wait()
        for segment in segments:
            claimed[index] += studies[index].claim([segment])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed[0] + claimed[1]) == segments


# --- trials -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_params_asked_by_two_workers_are_the_same_and_sampled_once(address: str, sampler: SamplerName) -> None:
    first, second = worker(address, "first", sampler=sampler), worker(address, "second", sampler=sampler)
    asked = [first.params(trial) for trial in (0, 2)]
    assert [second.params(trial) for trial in (0, 1, 2)] == [asked[0], first.params(1), asked[1]]
    assert [trial.user_attrs["trial"] for trial in optuna_trials(address)] == [0, 2, 1]


def test_params_asked_by_two_at_once_are_the_first_record(journal: str) -> None:
    inner = open_storage(journal)
    second = worker(journal, "second", sampler="tpe")
    asked: list[dict[str, Any]] = []

    class Interleaved(type(inner)):  # type: ignore[misc]
        def create_new_trial(self, *args: Any, **kwargs: Any) -> int:
            if "trial" in args[1].user_attrs and not asked:
                asked.append(second.params(0))
                args[1].params["rate"] = 0.123
            return int(super().create_new_trial(*args, **kwargs))

    inner.__class__ = Interleaved
    first = worker(inner, "first", sampler="tpe")
    assert first.params(0) == asked[0] and asked[0]["rate"] != 0.123
    assert [trial.state for trial in optuna_trials(inner)] == [OptunaState.RUNNING, OptunaState.FAIL]
    assert worker(journal, "third", sampler="tpe").params(0) == asked[0]


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_trials_of_a_killed_search_are_taken_up_and_not_sampled_anew(journal: str, sampler: SamplerName) -> None:
    with killed(journal, sampler) as (asked, finished):
        again = worker(journal, "again", sampler=sampler)
        assert [again.params(trial) for trial in range(4)] == asked
        assert len(optuna_trials(journal)) == 4
        assert again.results() == {SEGMENTS[0]: finished}
        assert again.claim(SEGMENTS) == SEGMENTS[1:]  # at once: the process that held them has ended
        assert done(again, SEGMENTS[1])


@contextmanager
def killed(journal: str, sampler: SamplerName) -> Iterator[tuple[list[dict[str, Any]], float]]:
    """A search whose process was killed in the middle of a write, with the journal locked."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        study = worker(journal, "killed", sampler=sampler)
        asked = [study.params(trial) for trial in range(4)]
        study.claim(SEGMENTS[:4])
        done(study, SEGMENTS[0], 0.75)
        path = Path(journal.removeprefix("journal:"))
        with locked(path, lambda: None), path.open("ab") as file:
            file.write(b'{"op_code":8,"worker_id":"x","trial_id":3,"user_at')
            file.flush()
            os.write(write, repr(asked).encode())
            signal.pause()
        os._exit(0)
    asked = eval(os.read(read, 10_000))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read), os.close(write)
    yield asked, 0.75


def test_tpe_learns_from_results_of_all_workers(journal: str) -> None:
    first, second = worker(journal, "first", sampler="tpe"), worker(journal, "second", sampler="tpe")
    alone = worker(InMemoryStorage(), sampler="tpe")
    for trial in range(12):
        study = (first, second)[trial % 2]
        value = 1.0 if study.params(trial)["rate"] > 0.05 else trial / 1000
        study.claim([Segment(trial, 0)])
        done(study, Segment(trial, 0), value)
        study.conclude(trial, TrialState.COMPLETE, value)
        alone.params(trial)
    assert first.params(12) == second.params(12) != alone.params(12)


@pytest.mark.parametrize(
    ("state", "value", "optunas"),
    [
        (TrialState.COMPLETE, 0.75, OptunaState.COMPLETE),
        (TrialState.PRUNED, 0.75, OptunaState.PRUNED),
        (TrialState.FAILED, None, OptunaState.FAIL),
    ],
)
def test_trial_concluded_is_told_to_optuna_with_its_rungs_and_reason(
    address: str, state: TrialState, value: float | None, optunas: OptunaState
) -> None:
    study, other = worker(address), worker(address, "other")
    study.params(0)
    study.claim([Segment(0, 0), Segment(0, 1)])
    study.finish(Segment(0, 0), 0.5, epochs=1 / 3, seconds=1.0)
    if value is None:
        study.fail(Segment(0, 1), "ValueError: no")
    else:
        study.finish(Segment(0, 1), value, epochs=1.0, seconds=1.0)
    study.conclude(0, state, value)
    other.conclude(0, TrialState.COMPLETE, 0.1)  # told before: nothing
    (kept,) = optuna_trials(address)
    reason = None if value else "ValueError: no"
    assert (kept.state, kept.value, kept.user_attrs.get("reason")) == (optunas, value, reason)
    assert kept.intermediate_values == ({333: 0.5, 1000: 0.75} if value else {333: 0.5})


def test_trial_concluded_has_the_rungs_that_a_killed_worker_did_not_report(journal: str) -> None:
    study, other = worker(journal), worker(journal, "other")
    study.params(0)
    study.claim(SEGMENTS[:1])
    study._report = lambda *_: None  # type: ignore[method-assign]
    done(study, SEGMENTS[0])
    assert optuna_trials(journal)[0].intermediate_values == {}
    other.conclude(0, TrialState.COMPLETE, 0.5)
    assert optuna_trials(journal)[0].intermediate_values == {1000: 0.5}


# --- what the storage is ----------------------------------------------------------------------------------------------


def test_search_of_another_identity_is_refused_by_its_first_difference(address: str) -> None:
    study = worker(address)
    study.open({"space": {"rate": {"low": 0.001}}, "metric": "accuracy"})
    with pytest.raises(UserError, match=r"another search named 'mine': space.rate.low is 0.001 there and 0.1 here"):
        study.open({"metric": "accuracy", "space": {"rate": {"low": 0.1}}})
    with pytest.raises(UserError, match=r"metric is \"accuracy\" there and null here"):
        study.open({"space": {"rate": {"low": 0.1}}})


def test_search_of_another_name_in_the_same_storage_is_another(journal: str) -> None:
    study = worker(journal)
    study.claim(SEGMENTS)
    other = SharedStudy(
        journal, "other", sampler="random", space=SPACE, seed=3, maximize=False, worker="w", lease_s=10.0
    )
    other.open({"metric": "loss"})
    assert other.claim(SEGMENTS) == SEGMENTS


def test_study_of_another_program_is_refused(address: str) -> None:
    optuna.create_study(storage=open_storage(address), study_name="mine", direction="maximize").ask()
    with pytest.raises(UserError, match="holds another search named 'mine': its trial 0 is of another program"):
        worker(address)


@pytest.mark.parametrize(
    "use",
    [
        lambda study: study.claim(SEGMENTS),
        lambda study: study.results(),
        lambda study: study.params(1),
        lambda study: done(study, SEGMENTS[0]),
    ],
)
def test_storage_whose_folder_is_removed_ends_in_one_error(tmp_path: Path, use: Callable[[SharedStudy], Any]) -> None:
    (tmp_path / "run").mkdir()
    study = worker(f"journal:{tmp_path}/run/a")
    study.params(0)
    study.claim(SEGMENTS[:1])
    shutil.move(tmp_path / "run", tmp_path / "away")
    with pytest.raises(StorageError, match=r"storage journal:.*/run/a cannot be used, tried 9 times: FileNotF"):
        use(study)
    shutil.move(tmp_path / "away", tmp_path / "run")
    assert list(study.held) == SEGMENTS[:1] and done(study, SEGMENTS[0])
    assert worker(f"journal:{tmp_path}/run/a").results() == {SEGMENTS[0]: 0.5}


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


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_storage_that_fails_for_a_moment_changes_nothing(every: int, is_after: bool) -> None:
    storage = Failing()
    expected = worker(InMemoryStorage())
    storage.is_after, storage.every = is_after, every
    study, other = worker(storage, "w"), worker(storage, "other")
    assert [study.params(trial) for trial in range(3)] == [expected.params(trial) for trial in range(3)]
    assert study.claim(SEGMENTS[:3]) == SEGMENTS[:3] and other.claim(SEGMENTS[:3]) == []
    assert all(done(study, segment) for segment in SEGMENTS[:2])
    study.release(SEGMENTS[2])
    assert other.claim(SEGMENTS[:3]) == SEGMENTS[2:3]
    study.conclude(0, TrialState.COMPLETE, 0.5)
    assert other.results() == {SEGMENTS[0]: 0.5, SEGMENTS[1]: 0.5}
    storage.every = 0
    kept = {trial.user_attrs["trial"]: trial for trial in reversed(optuna_trials(storage))}
    assert [kept[trial].state for trial in range(3)] == [OptunaState.COMPLETE, OptunaState.RUNNING, OptunaState.RUNNING]


def test_storage_that_is_locked_for_good_ends_in_one_error_that_keeps_the_state() -> None:
    storage = Failing()
    study = worker(storage)
    study.params(0)
    study.claim(SEGMENTS)
    done(study, SEGMENTS[0])
    storage.every = 1
    with pytest.raises(StorageError, match="^the search's storage Failing cannot be used, tried 9 times: StorageIn"):
        done(study, SEGMENTS[1])
    storage.every = 0
    assert study.held == tuple(SEGMENTS[1:]) and done(study, SEGMENTS[1])


def test_optuna_says_nothing(journal: str, capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    study = worker(journal, sampler="tpe")
    for trial in range(12):
        study.params(trial)
    study.conclude(0, TrialState.FAILED, None)
    assert capfd.readouterr() == ("", "")
