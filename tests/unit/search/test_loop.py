"""One worker's loop: rungs, failures, resumes and several workers, on small models."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py.core.errors import LearnerError
from crossbow_py.packs import slots, trial_registry
from crossbow_py.packs.pack import Pack
from crossbow_py.packs.policies import Policy
from crossbow_py.search.hyperband import Segment, TrialState, ready, standing
from crossbow_py.search.loop import SearchLoop
from crossbow_py.search.outcome import trial_records
from tests.unit.search.study.shared_studies import why_failed
from tests.unit.search.tiny_search import ONE_SIZE, Setting, finished, let_leases_end, never, one_round, watch


class Breaking(nn.Linear):
    """A model that raises once its weights have moved."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.rounds += 1
        if self.training and self.rounds > 3:
            raise ArithmeticError("three rounds are enough")
        return super().forward(inputs)


class Unmeasurable(nn.Linear):
    """Which raises in evaluation, but for the two samples it is tried on."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and len(inputs) > 2:
            raise ArithmeticError("no evaluation")
        return super().forward(inputs)


def test_search_keeps_the_top_third_of_every_rung_and_runs_no_segment_twice(setting: Setting) -> None:
    assert setting.search().run(never)
    results = setting.study().results()
    assert len(setting.finished) == len(set(setting.finished)) == len(results) == 9 + 3 + 1
    for rung, keep in ((0, 3), (1, 1)):
        values = {segment.trial: results[segment] for segment in results if segment.rung == rung}
        expected = sorted(values, key=lambda trial: (-(values[trial] or 0), trial))[:keep]
        assert sorted(segment.trial for segment in results if segment.rung == rung + 1) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["signature", "batch_size", "random", "knn", "none"])
def test_every_policy_finds_the_same_values(setting: Setting, policy: Policy, tmp_path: Path) -> None:
    setting.policy = policy
    assert setting.search().run(never)
    assert setting.study().results() == pytest.approx(finished(tmp_path / "others", width=1).study().results())


def test_trials_of_two_batch_sizes_run_side_by_side_each_with_batches_of_its_size(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # of packs there are no more than cores
    seen: list[set[int]] = []

    def look(packs: Sequence[Pack], *_: Any) -> None:
        sizes = [{member.settings.batch_size for member in pack.members} for pack in packs]
        assert all(size == {pack.feed.batch_size} for size, pack in zip(sizes, packs, strict=True))
        seen.append(set().union(*sizes))

    watch(monkeypatch, slots, "advance", look)
    assert setting.search().run(never)
    assert {4, 8} in seen


@pytest.mark.slow
def test_hyperband_interleaves_brackets_so_that_packs_stay_full(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.method, setting.space, setting.num_trials = "hyperband", ONE_SIZE, 17
    rows: list[int] = []
    watch(monkeypatch, slots, "advance", lambda packs, *_: rows.append(sum(len(pack.members) for pack in packs)))
    assert setting.search().run(never)
    found = standing(setting.rules().brackets, setting.study().results(), maximize=True).values()
    assert {where.state for where in found} == {TrialState.PRUNED, TrialState.COMPLETE}
    first_narrow = next(number for number, count in enumerate(rows) if count < 4)
    assert first_narrow > len(rows) // 2  # only when little is left


def test_killed_search_repeats_no_finished_rung_and_finds_the_same_best(setting: Setting, tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole")
    for after in (1, 3, 4):  # the process ends without a word: no release, no close
        stopped_at = len(setting.finished) + after
        search = setting.search(setting.study(f"worker {after}"))
        search.close = lambda: None  # type: ignore[method-assign]
        assert not search.run(lambda: len(setting.finished) >= stopped_at)  # noqa: B023
        search.packs.close()
        let_leases_end(search)
    assert setting.search(setting.study("last")).run(never)
    assert len(setting.finished) == len(set(setting.finished)) == 13
    assert setting.best() == whole.best()
    assert setting.study().results() == pytest.approx(whole.study().results())


def test_stopped_search_goes_on_in_the_middle_of_its_segments(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = finished(tmp_path / "whole", space=ONE_SIZE)
    setting.space = ONE_SIZE
    monkeypatch.setattr(slots, "advance", one_round)
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


@pytest.mark.slow
def test_search_killed_within_long_segments_goes_on_where_they_were_kept(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space, setting.checkpoint_every_s = ONE_SIZE, 0.0
    monkeypatch.setattr(slots, "advance", one_round)
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
    watch(monkeypatch, trial_registry, "measured_width", lambda *args: alone.append(args[-1].is_alone))
    other = setting.study("other")
    other.renew()  # it lives
    search = setting.search(setting.study("first"))
    search._admit()
    assert [slot.segment.trial for slot in search.slots] == [0, 1, 2, 3, 4]
    assert alone == [False] and not search.registry.is_alone
    other.leave()
    search._admitted_at = (-1, ())
    search._admit()
    assert len(search.slots) == 9 and search.registry.is_alone
    search.close()
    assert setting.study("third").num_searchers() == 1  # but for itself all have left


def test_workers_on_other_hosts_share_the_trials_and_are_no_company_while_packs_are_measured(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space, setting.width = ONE_SIZE, 9
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("crossbow_py.search.study.claims._host", lambda: "another 1 0")
        setting.study("other").renew()
    search = setting.search(setting.study("first"))
    search._admit()
    assert len(search.slots) == 5 and search.registry.is_alone
    search.close()


def test_promoted_trials_whose_files_are_elsewhere_are_left_to_others_while_there_is_something_else(
    setting: Setting, tmp_path: Path
) -> None:
    setting.method, setting.space, setting.width, setting.num_trials = "hyperband", ONE_SIZE, 5, 9 + 5
    assert not setting.search().run(lambda: len(setting.finished) >= 9)  # the first rung of the first bracket
    promoted = {each.trial for each in ready(setting.rules().brackets, setting.study().results(), maximize=True)[:3]}
    here = setting.search(setting.study("here"))
    elsewhere = replace(setting, folder=tmp_path / "there").search(setting.study("there"))
    for search in (elsewhere, here):
        search.results = search.study.results()
    assert {segment.trial for segment, _ in here._waiting(waiting_segments(here))[:3]} == promoted
    assert [segment.trial for segment, _ in elsewhere._waiting(waiting_segments(elsewhere))[:5]] == [9, 10, 11, 12, 13]


def test_signal_while_packs_are_measured_ends_the_search_before_it_trains(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.width = 9
    signals: list[str] = []
    asked: list[bool] = []

    def signal(*args: Any) -> None:
        signals.append("SIGTERM")
        asked.append(args[-1].stopped())

    watch(monkeypatch, trial_registry, "measured_width", signal)
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


def waiting_segments(search: SearchLoop) -> list[Segment]:
    return ready(search.rules.brackets, search.results, maximize=True)


@pytest.mark.slow
def test_streamed_samples_are_shared_by_trials_that_are_at_the_same_ones(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space, setting.method, setting.num_trials, setting.streams = ONE_SIZE, "hyperband", 22, True
    starts: list[set[int]] = []

    def look(pack: Pack) -> None:
        starts.append({member.samples_seen for member in pack.members if not member.is_over})

    watch(monkeypatch, Pack, "step", look)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Breaking, "ArithmeticError: three rounds are enough"),
        (partial(Unmeasurable, 4, 3), "its evaluation failed: ArithmeticError: no evaluation"),
    ],
)
def test_trial_that_raises_fails_with_its_reason_and_the_others_go_on(
    setting: Setting, make: Callable[[], nn.Module], reason: str
) -> None:
    setting.space = ONE_SIZE
    setting.make = lambda trial: make if trial in (1, 2) else partial(nn.Linear, 4, 3)
    assert setting.search().run(never)
    assert why_failed(setting.study()) == {1: reason, 2: reason}
    states = [record.state for record in trial_records(setting.rules(), setting.study())]
    assert states.count(TrialState.FAILED) == 2 and states.count(TrialState.COMPLETE) == 1


@pytest.mark.slow
def test_trial_that_raises_in_a_pack_is_found_by_training_each_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space = ONE_SIZE

    def fail(pack: Pack) -> None:
        if any(member.trial == 1 for member in pack.members):
            raise LearnerError("learning(1)", 0, "learner 1", ArithmeticError("odd")) from ArithmeticError("odd")

    watch(monkeypatch, Pack, "step", fail)
    assert setting.search().run(never)
    assert why_failed(setting.study()) == {1: "ArithmeticError: odd"}
    assert any("one at a time" in message for message in setting.messages)


def test_trial_whose_settings_are_refused_fails_and_the_others_go_on(setting: Setting) -> None:
    setting.rates = {0: -1.0, 4: 1e38}
    assert setting.search().run(never)
    reasons = why_failed(setting.study())
    assert reasons == {0: "a learning rate below 0 goes uphill", 4: "its loss or gradient is not finite"}
    assert [message for message in setting.messages if "Trial 0 failed" in message]


@pytest.mark.slow
def test_state_that_is_lost_is_trained_again_from_the_beginning(setting: Setting, tmp_path: Path) -> None:
    whole = finished(tmp_path / "whole")
    search = setting.search()
    assert not search.run(lambda: len(setting.finished) >= 9)
    for state in setting.folder.glob("*/*.pt"):
        state.write_bytes(b"torn")
    assert setting.search().run(never)
    assert setting.study().results() == pytest.approx(whole.study().results())
    assert any("trained from its beginning" in message for message in setting.messages)


def test_segments_that_others_took_leave_their_rows_and_the_search_goes_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.space = ONE_SIZE

    monkeypatch.setattr(slots, "advance", one_round)
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


@pytest.mark.slow
def test_packs_on_a_cpu_are_no_more_than_its_cores(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.policy, setting.width = "random", 8
    setting.make = lambda trial: partial(nn.Linear, 4, 3, bias=trial % 2 == 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    counts: list[int] = []
    watch(monkeypatch, slots, "advance", lambda packs, *_: counts.append(len(packs)))
    assert setting.search().run(never)
    assert 1 < max(counts) <= 3
