"""One worker's loop: rungs, failures, resumes and several workers, on small models and a storage in memory."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import SGD, Constant, evaluation
from crossbow_py.data.feeds import make_feed
from crossbow_py.data.resident import ResidentFeed
from crossbow_py.engine import memory
from crossbow_py.engine.precision import FP32
from crossbow_py.errors import DataError, DeviceLostError, LearnerError, UserError
from crossbow_py.evaluation import Evaluation, Evaluator
from crossbow_py.file_locks import locked
from crossbow_py.packing import outcome, places, roster
from crossbow_py.packing import search as search_module
from crossbow_py.packing.hyperband import Segment, TrialState, best, make_brackets, ready, standing
from crossbow_py.packing.outcome import Leader, LeaderRun, find_leader, kept_best, lock_of, trial_records
from crossbow_py.packing.pack import Pack
from crossbow_py.packing.places import Place
from crossbow_py.packing.policies import Policy
from crossbow_py.packing.roster import Roster, SearchData
from crossbow_py.packing.rules import SearchRules
from crossbow_py.packing.search import Search, SearchHooks
from crossbow_py.packing.search_events import BestTrial
from crossbow_py.packing.space import Space
from crossbow_py.packing.states import TrialStates
from crossbow_py.packing.study import SharedStudy
from crossbow_py.packing.trial import TrialSettings
from crossbow_py.packing.width import Width
from crossbow_py.run_settings import Choices, RunSettings
from tests.trainers import blobs
from tests.unit.packing.shared_studies import why_failed

SPACE = Space.from_mapping({"optimizer.learning_rate": {"low": 1e-4, "high": 1.0, "log": True}, "batch_size": [4, 8]})
ONE_SIZE = Space.from_mapping({"optimizer.learning_rate": {"low": 1e-4, "high": 1.0, "log": True}})
CHOICES = Choices(torch.device("cpu"), FP32, "serial")
LOSS = nn.functional.cross_entropy


class Breaking(nn.Module):
    """A linear model that raises once its weights have moved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.rounds += 1
        if self.training and self.rounds > 3:
            raise ArithmeticError("three rounds are enough")
        return self.linear(inputs)  # type: ignore[no-any-return]


@dataclass
class Setting:
    """What a search of tiny models needs; every call of `search` is a new worker process, so to say."""

    folder: Path
    space: Space = SPACE
    method: str = "successive_halving"
    num_trials: int = 9
    policy: Policy = "signature"
    width: int = 4
    checkpoint_every_s: float | None = None
    streams: bool = False
    make: Callable[[int], Callable[[], nn.Module]] = lambda trial: partial(nn.Linear, 4, 3)
    rates: Mapping[int, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    finished: list[Segment] = field(default_factory=list)

    def rules(self) -> SearchRules:
        brackets = make_brackets(self.method, num_trials=self.num_trials, min_epochs=1, max_epochs=9, eta=3)
        return SearchRules(brackets, "accuracy", self.policy, 0, self.width, self.checkpoint_every_s)

    def study(self, worker: str = "worker") -> SharedStudy:
        self.folder.parent.mkdir(exist_ok=True)
        study = SharedStudy(
            f"journal:{self.folder.parent / 'search.journal'}",
            "tiny",
            sampler="random",
            space=self.space,
            seed=1,
            maximize=True,
            worker=worker,
            lease_s=30,
        )
        study.open({"tiny": 1})
        return study

    def roster(self, told: Callable[[str], None]) -> Roster:
        feed = make_feed(blobs(40), 1, 0)
        assert isinstance(feed, ResidentFeed)
        validation, test = make_feed(blobs(30), 1), make_feed(blobs(21), 1)
        data = SearchData(feed.with_batch_size, 40, validation, test, (3, True), self.streams)
        return Roster(self.trial, self.space, data, RunSettings(device="cpu"), CHOICES, LOSS, self.width, told)

    def trial(self, trial: int, params: Mapping[str, Any]) -> TrialSettings:
        rate = self.rates.get(trial, params["optimizer.learning_rate"])
        if rate < 0:
            raise UserError("a learning rate below 0 goes uphill")
        model = self.make(trial)
        batch = params.get("batch_size", 4)
        return TrialSettings(trial, model, repr(model), batch, SGD(learning_rate=rate, momentum=0.5), Constant())

    def search(self, study: SharedStudy | None = None) -> Search:
        hooks = SearchHooks(
            message=self.messages.append,
            finished=lambda _, segment: self.finished.append(segment),
            sleep=lambda _: None,
        )
        states = TrialStates(self.folder)
        return Search(
            self.rules(), study or self.study(), self.roster(self.messages.append), states, RunSettings(device="cpu"),
            CHOICES, LOSS, hooks,
        )  # fmt: skip

    def best(self) -> int | None:
        return best(self.rules().brackets, self.study().results(), maximize=True)


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Packs of four, unmeasured."""

    def width(trials: Any, limit: int, *_: Any) -> Any:
        return Width(limit, {("serial", 1): 1.0}, "four by four"), []

    monkeypatch.setattr("crossbow_py.packing.roster.measured_width", width)
    return Setting(tmp_path / "trials")


def never() -> bool:
    return False


def test_search_keeps_the_top_third_of_every_rung_and_runs_no_segment_twice(setting: Setting) -> None:
    assert setting.search().run(never)
    results = setting.study().results()
    assert len(setting.finished) == len(set(setting.finished)) == len(results) == 9 + 3 + 1
    for rung, keep in ((0, 3), (1, 1)):
        values = {segment.trial: results[segment] for segment in results if segment.rung == rung}
        expected = sorted(values, key=lambda trial: (-(values[trial] or 0), trial))[:keep]
        assert sorted(segment.trial for segment in results if segment.rung == rung + 1) == sorted(expected)


@pytest.mark.parametrize("policy", ["signature", "batch_size", "random", "knn", "none"])
def test_every_policy_finds_the_same_values(setting: Setting, policy: Policy, tmp_path: Path) -> None:
    setting.policy = policy
    assert setting.search().run(never)
    other = Setting(tmp_path / "others" / "trials", width=1)
    assert other.search().run(never)
    ours, theirs = setting.study().results(), other.study().results()
    assert ours.keys() == theirs.keys() and all(ours[each] == pytest.approx(theirs[each]) for each in ours)


def test_trials_of_two_batch_sizes_run_side_by_side_each_with_batches_of_its_size(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # of packs there are no more than cores
    seen: list[set[int]] = []
    advance = places.advance

    def spied(packs: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = [{member.settings.batch_size for member in pack.members} for pack in packs]
        assert all(size == {pack.feed.batch_size} for size, pack in zip(sizes, packs, strict=True))
        seen.append(set().union(*sizes))
        return advance(packs, *args, **kwargs)

    monkeypatch.setattr(places, "advance", spied)
    assert setting.search().run(never)
    assert {4, 8} in seen


def test_hyperband_interleaves_brackets_so_that_packs_stay_full(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.method, setting.space, setting.num_trials = "hyperband", ONE_SIZE, 17
    rows: list[int] = []
    advance = places.advance

    def spied(packs: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(sum(len(pack.members) for pack in packs))
        return advance(packs, *args, **kwargs)

    monkeypatch.setattr(places, "advance", spied)
    assert setting.search().run(never)
    states = {
        where.state for where in standing(setting.rules().brackets, setting.study().results(), maximize=True).values()
    }
    assert states == {TrialState.PRUNED, TrialState.COMPLETE}
    first_narrow = next(place for place, count in enumerate(rows) if count < 4)
    assert first_narrow > len(rows) // 2  # only when little is left


def test_killed_search_repeats_no_finished_rung_and_finds_the_same_best(setting: Setting, tmp_path: Path) -> None:
    whole = Setting(tmp_path / "whole" / "trials")
    assert whole.search().run(never)
    for after in (1, 3, 4):  # the process ends without a word: no release, no close
        stopped_at = len(setting.finished) + after
        search = setting.search(setting.study(f"worker {after}"))
        search.close = lambda: None  # type: ignore[method-assign]
        assert not search.run(lambda: len(setting.finished) >= stopped_at)  # noqa: B023
        search.packs.close()
        let_leases_end(search)
    assert setting.search(setting.study("last")).run(never)
    assert len(setting.finished) == len(set(setting.finished)) == 13
    ours, theirs = setting.study().results(), whole.study().results()
    assert setting.best() == whole.best() and ours.keys() == theirs.keys()
    assert all(ours[each] == pytest.approx(theirs[each]) for each in ours)


def let_leases_end(search: Search) -> None:
    """What the end of a process does; this one lives on."""
    search.study.close()
    for segment in search.study.held:
        search.study.release(segment)


def test_stopped_search_gives_back_what_it_held(setting: Setting) -> None:
    search = setting.search()
    assert not search.run(lambda: len(setting.finished) >= 3)
    assert search.study.held == () and search.places == []
    assert setting.search(setting.study("other")).run(never)
    assert len(setting.finished) == len(set(setting.finished)) == 13


def one_round(packs: Any, *args: Any, **kwargs: Any) -> dict[int, Exception]:
    assert packs, "there is something to train"
    for pack in packs:
        pack.step()
        pack.drain()
    return {}


def test_stopped_search_goes_on_in_the_middle_of_its_segments(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = Setting(tmp_path / "whole" / "trials", space=ONE_SIZE)
    assert whole.search().run(never)
    setting.space = ONE_SIZE
    monkeypatch.setattr(places, "advance", one_round)
    samples, turns = 0, iter(range(10_000))
    for stop in (3, 14, 40, 10_000):  # of 10 rounds in the first rung; 10 more samples a round for each of four rows
        search = setting.search()
        is_over = search.run(lambda: next(turns) >= stop)  # noqa: B023
        samples += search.spent.samples
    assert is_over and samples == search.num_samples * (9 * 1 + 3 * 2 + 1 * 6)  # nothing trained twice
    ours, theirs = setting.study().segment_results(), whole.study().segment_results()
    assert ours.keys() == theirs.keys()
    for each in ours:
        assert ours[each].value == theirs[each].value
        assert ours[each].attrs["train_loss"] == pytest.approx(theirs[each].attrs["train_loss"])
    assert not list(setting.folder.glob("*/*.underway.pt"))


def test_search_killed_within_long_segments_goes_on_where_they_were_kept(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space, setting.checkpoint_every_s = ONE_SIZE, 0.0
    monkeypatch.setattr(places, "advance", one_round)
    search = setting.search()
    search.close = lambda: None  # type: ignore[method-assign]
    assert not search.run(lambda: search.spent.samples >= 4 * 7 * 4)  # rows, rounds, samples
    search.packs.close()
    let_leases_end(search)
    later = setting.search()
    assert later.run(never)
    assert search.spent.samples == 4 * 7 * 4
    assert later.spent.samples + search.spent.samples == search.num_samples * (9 * 1 + 3 * 2 + 1 * 6)


def test_workers_that_live_take_their_share_of_a_rung_each(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.space, setting.width = ONE_SIZE, 9
    alone: list[bool] = []
    measured = roster.measured_width
    monkeypatch.setattr(roster, "measured_width", lambda *args: alone.append(args[-1].is_alone) or measured(*args))
    other = setting.study("other")
    other.renew()  # it lives
    search = setting.search(setting.study("first"))
    search._admit()
    assert [place.segment.trial for place in search.places] == [0, 1, 2, 3, 4]
    assert alone == [False] and not search.roster.is_alone
    other.leave()
    search._admitted_at = (-1, ())
    search._admit()
    assert len(search.places) == 9 and search.roster.is_alone
    search.close()
    assert setting.study("third").num_searchers() == 1  # but for itself all have left


def test_workers_on_other_hosts_share_the_trials_and_are_no_company_while_packs_are_measured(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space, setting.width = ONE_SIZE, 9
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("crossbow_py.packing.leases._host", lambda: "another 1 0")
        setting.study("other").renew()
    search = setting.search(setting.study("first"))
    search._admit()
    assert len(search.places) == 5 and search.roster.is_alone
    search.close()


def test_promoted_trials_whose_files_are_elsewhere_are_left_to_others_while_there_is_something_else(
    setting: Setting, tmp_path: Path
) -> None:
    setting.method, setting.space, setting.width = "hyperband", ONE_SIZE, 5
    setting.num_trials = 9 + 5
    assert not setting.search().run(lambda: len(setting.finished) >= 9)  # the first rung of the first bracket
    promoted = {each.trial for each in ready(setting.rules().brackets, setting.study().results(), maximize=True)[:3]}
    here, there = setting.search(setting.study("here")), Setting(tmp_path / "there")
    there.method, there.space, there.width, there.num_trials = "hyperband", ONE_SIZE, 5, 14
    elsewhere = there.search(setting.study("there"))
    for search in (elsewhere, here):
        search.results = search.study.results()
    assert {segment.trial for segment, _ in here._waiting(waiting_segments(here))[:3]} == promoted
    assert [segment.trial for segment, _ in elsewhere._waiting(waiting_segments(elsewhere))[:5]] == [9, 10, 11, 12, 13]


def test_signal_while_packs_are_measured_ends_the_search_before_it_trains(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.width = 9
    signals: list[str] = []
    measured = roster.measured_width
    asked: list[bool] = []

    def signalled(*args: Any) -> Any:
        signals.append("SIGTERM")
        asked.append(args[-1].stopped())
        return measured(*args)

    monkeypatch.setattr(roster, "measured_width", signalled)
    search = setting.search()
    assert not search.run(lambda: bool(signals))
    assert asked[0] and search.study.held == () and search.spent.samples == 0
    assert search.packs.count == 0


def test_worker_that_is_alone_waits_for_nobody_when_trials_fail(setting: Setting) -> None:
    setting.space, setting.rates = ONE_SIZE, dict.fromkeys(range(9), -1.0)
    slept: list[float] = []
    search = setting.search()
    search.hooks.sleep = slept.append
    assert search.run(never)
    assert len(why_failed(setting.study())) == 9 and slept == []


def waiting_segments(search: Search) -> list[Segment]:
    return ready(search.rules.brackets, search.results, maximize=True)


def test_streamed_samples_are_shared_by_trials_that_are_at_the_same_ones(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space, setting.method, setting.num_trials, setting.streams = ONE_SIZE, "hyperband", 22, True
    starts: list[set[int]] = []
    step = Pack.step

    def counted(pack: Pack) -> bool:
        starts.append({member.samples_seen for member in pack.members if not member.is_over})
        return step(pack)

    monkeypatch.setattr(Pack, "step", counted)
    assert setting.search().run(never)
    assert max(map(len, starts)) == 1
    assert len(setting.finished) == len(set(setting.finished))


def test_two_workers_share_the_trials_and_train_none_twice(setting: Setting) -> None:
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            assert setting.search(setting.study(name)).run(never)
        except BaseException as error:
            errors.append(error)

    setting.width = 2
    threads = [threading.Thread(target=work, args=(f"worker {number}",)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(setting.finished) == sorted(set(setting.finished)) and len(setting.finished) == 13
    workers = {result.worker for result in setting.study().segment_results().values()}
    assert len(workers) == 2


def test_trial_that_raises_fails_with_its_reason_and_the_others_go_on(setting: Setting) -> None:
    setting.space = ONE_SIZE
    setting.make = lambda trial: Breaking if trial == 2 else partial(nn.Linear, 4, 3)
    assert setting.search().run(never)
    assert why_failed(setting.study()) == {2: "ArithmeticError: three rounds are enough"}
    states = [record.state for record in trial_records(setting.rules(), setting.study())]
    assert states.count(TrialState.FAILED) == 1 and states.count(TrialState.COMPLETE) == 1


def test_trial_that_raises_in_a_pack_is_found_by_training_each_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space = ONE_SIZE
    step = Pack.step

    def failing(pack: Pack) -> bool:
        if any(member.trial == 1 for member in pack.members):
            raise LearnerError("learning(1)", 0, "learner 1", ArithmeticError("odd")) from ArithmeticError("odd")
        return step(pack)

    monkeypatch.setattr(Pack, "step", failing)
    assert setting.search().run(never)
    assert why_failed(setting.study()) == {1: "ArithmeticError: odd"}
    assert any("one at a time" in message for message in setting.messages)


def test_memory_that_does_not_hold_a_pack_makes_it_narrower(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.space = ONE_SIZE
    step, widths = Pack.step, []

    def failing(pack: Pack) -> bool:
        widths.append(len(pack.members))
        if len(pack.members) > 2:
            raise MemoryError
        return step(pack)

    monkeypatch.setattr(Pack, "step", failing)
    assert setting.search().run(never)
    assert max(widths) == 4 and set(widths[1:]) == {1, 2} and not why_failed(setting.study())


@pytest.fixture
def side_by_side(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A search with trials of two kinds, one of each beside the other now and then."""
    setting.policy, setting.space, setting.make, setting.width = "random", ONE_SIZE, two_architectures, 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return setting


def test_trials_whose_packs_run_out_of_memory_at_once_train_alone(
    side_by_side: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, failed = places.advance, []

    def short(packs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(packs) == 1:
            return advance(packs, *args, **kwargs)
        failed.append(len(packs))
        return {number: torch.OutOfMemoryError("CUDA out of memory") for number in range(len(packs))}

    monkeypatch.setattr(places, "advance", short)
    assert side_by_side.search().run(never)
    assert failed and not why_failed(side_by_side.study())


def test_trials_that_memory_does_not_seat_beside_each_other_train_alone(
    side_by_side: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, seat = side_by_side.search(), Pack.seat
    banks: list[weakref.ref[nn.Module]] = []
    num_held: list[int] = []

    def short(pack: Pack, *args: Any) -> None:
        num_held.append(sum(bank() is not None for bank in banks))
        if len({place.pack_key for place in search.places}) > 1:
            bank = nn.Linear(4, 3)
            banks.append(weakref.ref(bank))
            raise MemoryError
        seat(pack, *args)

    monkeypatch.setattr(Pack, "seat", short)
    assert search.run(never)
    assert banks and not why_failed(side_by_side.study())
    assert set(num_held) == {0}  # half-made banks are gone when the next is made


LOST = "CUDA error: device-side assert triggered"


def lost(*_: Any, **__: Any) -> Any:
    raise RuntimeError(LOST)


def lost_in_a_loss(*_: Any, **__: Any) -> Any:
    raise UserError("the model cannot take the training data") from RuntimeError(LOST)


def lost_samples(*_: Any, **__: Any) -> Any:
    raise DataError("samples cannot be made") from RuntimeError(LOST)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors mean what they would if packs were on CUDA."""
    is_lost = memory.is_device_lost
    monkeypatch.setattr(memory, "is_device_lost", lambda error, _: is_lost(error, torch.device("cuda")))


@pytest.mark.parametrize(
    ("owner", "name", "raises"),
    [
        (roster, "probe", lost_in_a_loss),
        (roster, "measured_width", lost),
        (Pack, "seat", lost),
        (Pack, "step", lost),
        (Pack, "step", lost_samples),
        (Pack, "drain", lost),
        (Pack, "evaluate", lost),
        (Pack, "checkpoint", lost),
        (Pack, "evaluate", lost_samples),
        (places, "Evaluator", lost),
    ],
)
@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_ends_the_search_and_fails_no_trial(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, raises: Callable[..., Any]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, raises)
        with pytest.raises(DeviceLostError, match="device-side assert"):
            setting.search().run(never)
    assert setting.study().results() == {}
    assert setting.search().run(never)


@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_when_a_stop_keeps_segments_says_so(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "advance", one_round)
    monkeypatch.setattr(Pack, "checkpoint", lost)
    search = setting.search()
    with pytest.raises(DeviceLostError, match="device-side assert"):
        search.run(lambda: search.spent.samples > 0)


@pytest.mark.parametrize(
    ("owner", "name"), [(places, "free_memory"), (places, "evaluate_in_memory"), (evaluation, "free_memory")]
)
@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_while_packs_make_room_for_evaluation_ends_the_search(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def short(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "evaluate", short)
        patched.setattr(owner, name, lost)
        with pytest.raises(DeviceLostError, match="device-side assert"):
            setting.search().run(never)
    assert setting.study().results() == {}


@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_as_a_pack_has_failed_ends_the_search(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(_: Pack) -> bool:
        raise MemoryError

    monkeypatch.setattr(Pack, "step", short)
    monkeypatch.setattr(search_module, "free_memory", lost)
    with pytest.raises(DeviceLostError, match="device-side assert"):
        setting.search().run(never)


def test_trial_on_a_cpu_whose_model_says_what_cuda_says_fails_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space, step = ONE_SIZE, Pack.step

    def failing(pack: Pack) -> bool:
        if any(member.trial == 1 for member in pack.members):
            raise RuntimeError("misaligned address")
        return step(pack)

    monkeypatch.setattr(Pack, "step", failing)
    assert setting.search().run(never)
    assert why_failed(setting.study()) == {1: "RuntimeError: misaligned address"}


def values_of(setting: Setting) -> dict[Segment, Any]:
    return {each: (result.value, result.attrs) for each, result in setting.study().segment_results().items()}


@pytest.fixture
def expected(tmp_path: Path) -> Callable[[Setting], dict[Segment, Any]]:
    """What a search like this one finds where memory is ample."""

    def found(setting: Setting) -> dict[Segment, Any]:
        whole = replace(setting, folder=tmp_path / "ample" / "trials", messages=[], finished=[])
        assert whole.search().run(never)
        return values_of(whole)

    return found


def two_architectures(trial: int) -> Callable[[], nn.Module]:
    return partial(nn.Linear, 4, 3, bias=trial < 3)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), UserError("the model cannot take it")])
def test_trial_that_cannot_be_described_in_the_memory_packs_leave_is_described_without_them(
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
    expected: Callable[[Setting], dict[Segment, Any]],
    error: Exception,
) -> None:
    setting.policy, setting.make, setting.width = "random", two_architectures, 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(places, "advance", one_round)
    whole = expected(setting)
    search = setting.search()
    probe, beside = roster.probe, []

    def short(*args: Any, **kwargs: Any) -> Any:
        if search.packs.count:
            beside.extend(place.progress for place in search.places)
            raise error from (MemoryError() if isinstance(error, UserError) else None)
        return probe(*args, **kwargs)

    monkeypatch.setattr(roster, "probe", short)
    assert search.run(never)
    assert 0 < max(beside) < 1 and not why_failed(setting.study())  # in the middle of a segment
    assert values_of(setting) == whole


def test_trial_that_no_memory_describes_fails_once_no_pack_holds_any(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.policy, setting.space, setting.make, setting.width = "random", ONE_SIZE, two_architectures, 2
    search, probe = setting.search(), roster.probe
    counts: dict[nn.Module, list[int]] = {}

    def short(template: nn.Module, *args: Any) -> Any:
        if getattr(template, "bias", None) is None:
            counts.setdefault(template, []).append(search.packs.count)
            raise MemoryError
        return probe(template, *args)

    monkeypatch.setattr(roster, "probe", short)
    assert search.run(never)
    assert why_failed(setting.study()) == dict.fromkeys(range(3, 9), "MemoryError")
    assert max(map(max, counts.values())) > 0
    assert {each[-1] for each in counts.values()} == {0}


def test_width_of_a_kind_is_found_in_all_of_the_memory(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.policy, setting.space, setting.make, setting.width = "random", ONE_SIZE, two_architectures, 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(places, "advance", one_round)
    search = setting.search()
    measured, counts = roster.measured_width, []

    def bounded(*args: Any) -> Any:
        make_room = args[-2]
        before = search.packs.count
        counts.append((before, make_room(), search.packs.count))
        return measured(*args)

    monkeypatch.setattr(roster, "measured_width", bounded)
    assert search.run(never)
    assert counts[0] == (0, False, 0) and counts[1] in ((1, True, 0), (2, True, 0)) and len(counts) == 2
    assert len(setting.finished) == len(set(setting.finished)) == 13


def test_stop_while_packs_have_made_room_keeps_where_segments_stand(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, expected: Callable[[Setting], dict[Segment, Any]]
) -> None:
    setting.policy, setting.make, setting.width = "random", two_architectures, 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(places, "advance", one_round)
    whole, search = expected(setting), setting.search()
    measured, signals = roster.measured_width, []

    def signalled(*args: Any) -> Any:
        if any(0 < place.progress < 1 for place in search.places) and args[-2]():
            signals.append("SIGTERM")
        return measured(*args)

    with monkeypatch.context() as patched:
        patched.setattr(roster, "measured_width", signalled)
        assert not search.run(lambda: bool(signals))
    later = setting.search()
    assert later.run(never)
    assert search.spent.samples + later.spent.samples == search.num_samples * (9 * 1 + 3 * 2 + 1 * 6)
    assert values_of(setting) == whole


@pytest.mark.parametrize(
    ("most_samples", "batches"), [(30, [30]), pytest.param(10, [30, 15, 7], marks=pytest.mark.slow)]
)
def test_trial_that_cannot_be_measured_in_the_memory_packs_leave_is_measured_without_them(
    setting: Setting,
    monkeypatch: pytest.MonkeyPatch,
    expected: Callable[[Setting], dict[Segment, Any]],
    most_samples: int,
    batches: list[int],
) -> None:
    whole = expected(setting)
    search = setting.search()
    evaluate, sizes = Evaluator.evaluate, []

    def short(evaluator: Evaluator, *args: Any) -> Any:
        evaluator.batch_size = min(30, evaluator.batch_size)  # as many as there are
        if not search.packs.count:
            sizes.append(evaluator.batch_size)
        if search.packs.count or evaluator.batch_size > most_samples:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(evaluator, *args)

    monkeypatch.setattr(Evaluator, "evaluate", short)
    assert search.run(never)
    assert sizes[: len(batches)] == batches and len(sizes) == len(batches) * 13
    assert not why_failed(setting.study()) and any("evaluation" in message for message in setting.messages)
    ours = setting.study().results()
    assert all(ours[each] == pytest.approx(value) for each, (value, _) in whole.items())


def test_trial_that_no_memory_measures_fails(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.space, evaluate = ONE_SIZE, Evaluator.evaluate
    setting.make = lambda trial: partial(nn.Linear, 4, 3, bias=trial not in (1, 3))
    search = setting.search()
    counts: list[int] = []

    def short(evaluator: Evaluator, *args: Any) -> Any:
        if getattr(evaluator.template, "bias", None) is None:
            counts.append(search.packs.count)
            raise MemoryError
        return evaluate(evaluator, *args)

    monkeypatch.setattr(Evaluator, "evaluate", short)
    assert search.run(never)
    assert why_failed(setting.study()) == dict.fromkeys((1, 3), "its evaluation failed: MemoryError")
    assert counts[0] > 0 and counts[-1] == 0


def test_trial_whose_settings_are_refused_fails_and_the_others_go_on(setting: Setting) -> None:
    setting.rates = {0: -1.0, 4: 1e38}
    assert setting.search().run(never)
    reasons = why_failed(setting.study())
    assert reasons == {0: "a learning rate below 0 goes uphill", 4: "its loss or gradient is not finite"}
    assert [message for message in setting.messages if "Trial 0 failed" in message]


def test_state_that_is_lost_is_trained_again_from_the_beginning(setting: Setting, tmp_path: Path) -> None:
    whole = Setting(tmp_path / "whole" / "trials")
    assert whole.search().run(never)
    search = setting.search()
    assert not search.run(lambda: len(setting.finished) >= 9)
    for state in setting.folder.glob("*/*.pt"):
        state.write_bytes(b"torn")
    assert setting.search().run(never)
    ours, theirs = setting.study().results(), whole.study().results()
    assert all(ours[each] == pytest.approx(theirs[each]) for each in theirs)
    assert any("trained from its beginning" in message for message in setting.messages)


def test_best_trial_is_measured_on_the_test_data_and_written(setting: Setting, tmp_path: Path) -> None:
    search = setting.search()
    assert search.run(never)
    best_folder = tmp_path / "best"

    def run_of(leader: Leader) -> LeaderRun:
        assert leader.is_at_end
        return LeaderRun(setting.trial(leader.trial, leader.params), "train it", "seed: 1\n")

    find = partial(find_leader, setting.rules(), setting.study())
    found, _ = kept_best(find, run_of, search.roster.data, search.states, CHOICES, LOSS, best_folder)
    assert found is not None
    assert (found.trial, found.epochs, found.seed) == (setting.best(), 9, setting.best())
    assert found.command == "train it" and found.params.keys() == {"batch_size", "optimizer.learning_rate"}
    assert found.value == max(value for value in setting.study().results().values() if value is not None)
    assert found.test_accuracy is not None and math.isfinite(found.test_accuracy)
    assert found.model_path == str(best_folder / "model.safetensors") and Path(found.model_path).exists()
    assert (best_folder / "config.yaml").read_text() == "seed: 1\n"
    left = sorted(path.parent.name for path in setting.folder.glob("*/*.pt"))
    assert left == [f"{found.trial:05}"]  # the files of the others are gone


def test_best_trial_of_a_search_without_any_value_is_nobody(setting: Setting, tmp_path: Path) -> None:
    def run_of(_: Leader) -> LeaderRun:
        raise AssertionError("there is nothing to train")

    search = setting.search()
    data = search.roster.data
    assert kept_best(lambda: None, run_of, data, search.states, CHOICES, LOSS, tmp_path / "best") == (None, 0.0)
    assert not (tmp_path / "best").exists()
    search.close()


Keep = Callable[..., tuple[BestTrial, float]]


@pytest.fixture
def kept(setting: Setting, tmp_path: Path) -> Keep:
    """`kept_best` of a finished search, with a configuration, into `best`, where that of another trial is."""
    search = setting.search()
    assert search.run(never)
    leader = find_leader(setting.rules(), setting.study())
    assert leader is not None
    first = leader
    (tmp_path / "best").mkdir()
    (tmp_path / "best/config.yaml").write_text("seed: 0\n")
    (tmp_path / "best/model.safetensors").write_text("of another trial")

    def keep(
        config: str, states: TrialStates = search.states, find: Callable[[], Leader] = lambda: first
    ) -> tuple[BestTrial, float]:
        def run_of(leader: Leader) -> LeaderRun:
            return LeaderRun(setting.trial(leader.trial, leader.params), "train it", config.format(leader.value))

        found, seconds = kept_best(find, run_of, search.roster.data, states, CHOICES, LOSS, tmp_path / "best")
        assert found is not None
        return found, seconds

    return keep


def test_best_trial_whose_files_are_elsewhere_leaves_no_model_of_another(kept: Keep, tmp_path: Path) -> None:
    elsewhere = TrialStates(tmp_path / "elsewhere")
    found, seconds = kept("seed: 1\n", elsewhere)
    assert (found.model_path, found.test_accuracy, seconds) == (None, None, 0)
    assert not list((tmp_path / "best").glob("[!.]*"))
    assert kept("seed: 1\n")[0].model_path == str(tmp_path / "best/model.safetensors")
    assert kept("seed: 1\n", elsewhere)[0].model_path == str(tmp_path / "best/model.safetensors")  # it is this trial's


def test_best_trial_whose_model_cannot_be_written_leaves_no_model_of_another(
    kept: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(outcome, "save_weights", full)
        with pytest.raises(UserError, match=r"cannot write to .*best \(.*No space left.*\); make room there"):
            kept("seed: 1\n")
    assert list((tmp_path / "best").iterdir()) == []  # nor a configuration, which would say that there is a model
    (tmp_path / "best/config.yaml").write_text("seed: 1\n")  # of an earlier version, without its model
    kept("seed: 1\n", TrialStates(tmp_path / "elsewhere"))
    assert list((tmp_path / "best").iterdir()) == []


def test_best_trial_is_the_one_that_is_known_once_no_other_worker_writes(kept: Keep, tmp_path: Path) -> None:
    leader = Leader(0, Segment(0, 0), 1.0, 0.25, {"optimizer.learning_rate": 0.1}, False)
    known, found = [leader], []
    with locked(lock_of(tmp_path / "best"), lambda: None):
        other = threading.Thread(target=lambda: found.append(kept("value: {}\n", find=lambda: known[-1])))
        other.start()
        other.join(0.2)
        known.append(replace(leader, value=0.5))
    other.join(10)
    assert found[0][0].value == 0.5


def test_best_trial_is_tested_with_as_many_samples_as_memory_holds(kept: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, sizes = Evaluator.evaluate, []
    ample, _ = kept("seed: 1\n")

    def short(evaluator: Evaluator, *args: Any) -> Any:
        sizes.append(evaluator.batch_size)
        if evaluator.batch_size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(evaluator, *args)

    monkeypatch.setattr(Evaluator, "evaluate", short)
    found, _ = kept("seed: 1\n")
    assert sizes == [256, 128, 64, 32, 16, 8]
    assert (found.test_accuracy, found.test_loss) == (ample.test_accuracy, pytest.approx(ample.test_loss))


@pytest.mark.parametrize(
    ("owner", "name"),
    [(outcome, "_evaluator"), (Evaluator, "module"), (Evaluator, "evaluate"), (outcome, "save_weights")],
)
@pytest.mark.usefixtures("as_on_cuda")
def test_device_that_is_lost_while_the_best_trial_is_tested_says_so(
    kept: Keep, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    monkeypatch.setattr(owner, name, lost)
    with pytest.raises(DeviceLostError, match="device-side assert"):
        kept("seed: 1\n")


def test_seconds_of_the_best_trial_are_those_of_its_measurement(kept: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def saved(model: nn.Module, path: Path) -> None:
        now[0] += 5

    def measured(*_: object) -> Evaluation:
        now[0] += 3
        return Evaluation(0.5, 0.75, 21)

    monkeypatch.setattr(outcome, "save_weights", saved)
    monkeypatch.setattr(Evaluator, "evaluate", measured)
    monkeypatch.setattr("crossbow_py.packing.outcome.time.perf_counter", lambda: now[0])
    found, seconds = kept("seed: 1\n")
    assert (found.test_accuracy, seconds) == (0.75, 3)


def test_best_trial_has_its_files_when_the_only_one_that_was_left_fails(setting: Setting) -> None:
    search = setting.search()
    measure = search.packs.measure

    def diverging(healthy: Sequence[Place]) -> list[Evaluation | str]:
        found = zip(healthy, measure(healthy), strict=True)
        return ["it diverged" if place.segment.rung == 2 else evaluation for place, evaluation in found]

    search.packs.measure = diverging  # type: ignore[method-assign]
    assert search.run(never)
    leader = find_leader(setting.rules(), setting.study())
    assert leader is not None and leader.last.rung == 1
    assert [path.relative_to(setting.folder) for path in setting.folder.glob("*/*")] == [
        Path(f"{leader.trial:05}", "rung_1.pt")
    ]


def test_segments_that_others_took_leave_their_rows_and_the_search_goes_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space = ONE_SIZE

    monkeypatch.setattr(places, "advance", one_round)
    study = setting.study()
    renew, lost = study.renew, []

    def renewed() -> list[Segment]:
        if setting.finished or lost or not study.held:
            return renew()
        lost.extend(study.held[:2])  # as if another worker had taken them
        for segment in lost:
            study.release(segment)
        return lost

    study.renew = renewed  # type: ignore[method-assign]
    search = setting.search(study)
    assert search.run(never) and len(lost) == 2
    assert len(setting.finished) == len(set(setting.finished)) == 13
    assert any("taken over" in message for message in setting.messages)


class Unmeasurable(nn.Linear):
    """Which raises in evaluation, but for the two samples it is tried on."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and len(inputs) > 2:
            raise ArithmeticError("no evaluation")
        return super().forward(inputs)


def test_trial_that_raises_in_evaluation_fails_and_the_others_go_on(setting: Setting) -> None:
    setting.space = ONE_SIZE
    setting.make = lambda trial: partial(Unmeasurable, 4, 3) if trial in (1, 3) else partial(nn.Linear, 4, 3)
    assert setting.search().run(never)
    reason = "its evaluation failed: ArithmeticError: no evaluation"
    assert why_failed(setting.study()) == {1: reason, 3: reason}


def test_model_whose_validation_loss_is_not_finite_fails_though_it_has_an_accuracy(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space = ONE_SIZE
    evaluate = Pack.evaluate

    def dead(pack: Pack, members: Any, *args: Any) -> Any:
        found = evaluate(pack, members, *args)
        return [replace(e, loss=math.nan) if m.trial == 2 else e for e, m in zip(found, members, strict=True)]

    monkeypatch.setattr(Pack, "evaluate", dead)
    assert setting.search().run(never)
    assert why_failed(setting.study()) == {2: "its loss on the validation data is not finite"}


def test_tpe_like_searches_sample_no_more_trials_than_there_is_room_for(setting: Setting) -> None:
    setting.space, setting.width = ONE_SIZE, 2
    search = setting.search()
    sampled: list[int] = []
    assert not search.run(lambda: bool(sampled.append(len(search.study.sampled())) or setting.finished))
    assert max(sampled) == 2


def test_packs_on_a_cpu_are_no_more_than_its_cores(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.policy, setting.width = "random", 8
    setting.make = lambda trial: partial(nn.Linear, 4, 3, bias=trial % 2 == 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    counts: list[int] = []
    advance = places.advance

    def spied(packs: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(packs))
        return advance(packs, *args, **kwargs)

    monkeypatch.setattr(places, "advance", spied)
    assert setting.search().run(never)
    assert 1 < max(counts) <= 3
