"""A search shared by workers: the same trials for all, told to Optuna, and what its storage may do to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.samplers import RandomSampler
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState as OptunaState
from optuna.trial import create_trial

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import locked
from crossbow_py.search.hyperband import Segment, TrialState
from crossbow_py.search.study.storage import StorageError, open_storage
from crossbow_py.search.study.study import SharedStudy
from tests.unit.search.study.shared_studies import SEGMENTS, Clock, Failing, done, optuna_trials, worker

# --- trials -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_params_asked_by_two_workers_are_the_same_and_sampled_once(address: str, sampler: str) -> None:
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


class Waiting(RandomSampler):
    """Samples once it may, and says when it was asked; `number` counts."""

    asked, may, number = threading.Event(), threading.Event(), 0

    def sample_independent(self, *args: Any, **kwargs: Any) -> Any:
        type(self).number += 1
        self.asked.set()
        assert self.may.wait(20)
        return super().sample_independent(*args, **kwargs)


def test_lease_is_prolonged_while_a_trial_is_sampled_which_one_thread_does(journal: str) -> None:
    clock = Clock()
    study = worker(journal, "first", clock=clock, sampler=f"{__name__}.Waiting")
    other = worker(journal, "other", clock=clock)
    Waiting.asked.clear(), Waiting.may.clear()
    Waiting.number = 0
    assert study.claim(SEGMENTS[:1]) == SEGMENTS[:1]
    with ThreadPoolExecutor() as pool:
        params = [pool.submit(study.params, 0) for _ in range(2)]
        assert Waiting.asked.wait(20)
        for _ in range(3):  # two leases long
            clock.now += 7.0
            assert pool.submit(study.renew).result(timeout=20) == []
            assert other.free(SEGMENTS[:2]) == SEGMENTS[1:2]
        Waiting.may.set()
        first, second = (each.result(timeout=20) for each in params)
    assert first == second == other.params(0) and Waiting.number == len(first)
    assert [trial.user_attrs["trial"] for trial in optuna_trials(journal)] == [0]


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_trials_of_a_killed_search_are_taken_up_and_not_sampled_anew(journal: str, sampler: str) -> None:
    with killed(journal, sampler) as (asked, finished):
        again = worker(journal, "again", sampler=sampler)
        assert [again.params(trial) for trial in range(4)] == asked
        assert len(optuna_trials(journal)) == 4
        assert again.results() == {SEGMENTS[0]: finished}
        assert again.claim(SEGMENTS) == SEGMENTS[1:]  # at once: the process that held them has ended
        assert done(again, SEGMENTS[1])


@contextmanager
def killed(journal: str, sampler: str) -> Iterator[tuple[list[dict[str, Any]], float]]:
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
            os.write(write, json.dumps(asked).encode())
            signal.pause()
        os._exit(0)
    asked = json.loads(os.read(read, 10_000))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read), os.close(write)
    yield asked, 0.75


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


# --- what a storage may not say ---------------------------------------------------------------------------------------


def written_by_a_stranger(address: str, params: dict[str, Any], distributions: dict[str, Any], trial: Any = 0) -> None:
    """A trial in the search's storage that none of its workers has sampled."""
    worker(address).close()
    storage = open_storage(address)
    attributes = {"trial": trial}
    record = create_trial(state=OptunaState.RUNNING, params=params, distributions=distributions, user_attrs=attributes)
    storage.create_new_trial(storage.get_study_id_from_name("mine"), record)


OWN: dict[str, Any] = {"rate": 0.01, "rule": "sgd"}
RATES, RULES = FloatDistribution(0.0, 9.0), CategoricalDistribution(("sgd", "adam", "os.system", 1))


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({**OWN, "model.target": "os.system"}, "trial 2 has model.target='os.system', which is not searched there"),
        ({**OWN, "rule": "os.system"}, "trial 2 has rule='os.system', and it is one of 'sgd', 'adam'"),
        ({**OWN, "rate": 7.0}, r"trial 2 has rate=7.0, and it is a number from 0.001 to 0.5"),
        ({"rate": 0.01}, "trial 2 has no rule"),
    ],
    ids=["another key", "another choice", "beyond its range", "without a key"],
)
def test_trial_with_parameters_that_are_not_searched_is_refused(
    address: str, params: dict[str, Any], found: str
) -> None:
    distributions = {key: RATES if key == "rate" else RULES for key in params}
    written_by_a_stranger(address, params, distributions, trial=2)
    with pytest.raises(UserError, match=found) as refused:
        worker(address)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("trial", ["../../x", -1, 1.5, True, None, [0]])
def test_trial_whose_number_is_none_is_refused(address: str, trial: Any) -> None:
    written_by_a_stranger(address, OWN, {"rate": RATES, "rule": RULES}, trial)
    with pytest.raises(UserError, match="its trial 0 is of another program"):
        worker(address)


@pytest.mark.parametrize(
    "attributes",
    [
        {"trial": "../../x", "rung": 0, "holder": "x"},
        {"trial": 0, "rung": "0/../../../x", "holder": "x"},
        {"trial": 0, "rung": -1, "holder": "x"},
        {"trial": 0, "holder": "x"},
        {"trial": 0, "rung": 0, "holder": "x"},
        {"trial": 0, "rung": 0, "holder": "x", "result": {"value": "0.5"}},
        {"trial": 0, "rung": 0, "holder": "x", "result": {"value": 0.5, "worker": ["x"]}},
        {"trial": 0, "rung": 0, "holder": "x", "result": {"value": 0.5, "other": 1}},
        {"trial": 0, "rung": 0, "holder": "x", "result": [1, 2]},
    ],
)
def test_claim_that_no_worker_has_made_is_refused(address: str, attributes: dict[str, Any]) -> None:
    study, storage = worker(address), open_storage(address)
    record = create_trial(state=OptunaState.COMPLETE, value=0.5, user_attrs=attributes)
    storage.create_new_trial(storage.get_study_id_from_name("mine/segments"), record)
    for use in (study.results, lambda: study.claim(SEGMENTS)):
        with pytest.raises(UserError, match="a claim is damaged"):
            use()


@pytest.mark.parametrize("plain", [None, {}, {"until": "x"}, {"beat": 1.0}, 7, [1]])
def test_lease_that_no_worker_has_taken_is_refused(address: str, plain: Any) -> None:
    study, storage = worker(address), open_storage(address)
    storage.set_study_user_attr(storage.get_study_id_from_name("mine/segments"), "lease of x", plain)
    with pytest.raises(UserError, match="a lease is damaged"):
        study.num_searchers()


@pytest.mark.parametrize(
    "line",
    [
        '{"op_code":4}', '{"op_code":99,"worker_id":"x"}',
        '{"op_code":"x","worker_id":1}', '{"op_code":4,"worker_id":"x","study_id":0,"user_attrs":[]}',
    ],
)  # fmt: skip
def test_journal_with_a_record_that_optuna_cannot_take_is_refused_in_one_line(journal: str, line: str) -> None:
    worker(journal).close()
    with Path(journal.removeprefix("journal:")).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match="holds what this search cannot have written") as refused:
        worker(journal)
    assert "\n" not in str(refused.value)
