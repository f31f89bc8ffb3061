"""A worker's loop where memory is short: narrower packs, trials alone, and room for what is measured."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.packs import slots, trial_registry
from crossbow_py.packs.pack import Pack
from crossbow_py.search.hyperband import Segment
from crossbow_py.train.evaluation.evaluator import Evaluator
from tests.unit.search.study.shared_studies import why_failed
from tests.unit.search.tiny_search import ONE_SIZE, SPACE, Setting, never, one_round, values_of, watch


@pytest.mark.slow
def test_memory_that_does_not_hold_a_pack_makes_it_narrower(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.space, widths = ONE_SIZE, []

    def fail(pack: Pack) -> None:
        widths.append(len(pack.members))
        if len(pack.members) > 2:
            raise MemoryError

    watch(monkeypatch, Pack, "step", fail)
    assert setting.search().run(never)
    assert max(widths) == 4 and set(widths[1:]) == {1, 2} and not why_failed(setting.study())


def two_architectures(trial: int) -> Callable[[], nn.Module]:
    return partial(nn.Linear, 4, 3, bias=trial < 3)


@pytest.fixture
def side_by_side(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A search with trials of two kinds, one of each beside the other now and then."""
    setting.policy, setting.space, setting.make, setting.width = "random", ONE_SIZE, two_architectures, 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return setting


@pytest.fixture
def round_by_round(side_by_side: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Such a search in two sizes of batches, whose turns are a round each."""
    side_by_side.space = SPACE
    monkeypatch.setattr(slots, "advance", one_round)
    return side_by_side


@pytest.mark.slow
def test_trials_whose_packs_run_out_of_memory_at_once_train_alone(
    side_by_side: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance, failed = slots.advance, []

    def short(packs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(packs) == 1:
            return advance(packs, *args, **kwargs)
        failed.append(len(packs))
        return {number: torch.OutOfMemoryError("CUDA out of memory") for number in range(len(packs))}

    monkeypatch.setattr(slots, "advance", short)
    assert side_by_side.search().run(never)
    assert failed and not why_failed(side_by_side.study())


@pytest.mark.slow
def test_trials_that_memory_does_not_seat_beside_each_other_train_alone(
    side_by_side: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = side_by_side.search()
    banks: list[weakref.ref[nn.Module]] = []
    num_held: list[int] = []

    def short(*_: Any) -> None:
        num_held.append(sum(bank() is not None for bank in banks))
        if len({slot.pack_key for slot in search.slots}) > 1:
            bank = nn.Linear(4, 3)
            banks.append(weakref.ref(bank))
            raise MemoryError

    watch(monkeypatch, Pack, "assign", short)
    assert search.run(never)
    assert banks and not why_failed(side_by_side.study())
    assert set(num_held) == {0}  # half-made banks are gone when the next is made


Expected = Callable[[Setting], dict[Segment, Any]]


@pytest.fixture
def expected(tmp_path: Path) -> Expected:
    """What a search like this one finds where memory is ample."""

    def found(setting: Setting) -> dict[Segment, Any]:
        whole = replace(setting, folder=tmp_path / "ample" / "trials", messages=[], finished=[])
        assert whole.search().run(never)
        return values_of(whole)

    return found


@pytest.mark.slow
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), UserError("the model cannot take it")])
def test_trial_that_cannot_be_described_in_the_memory_packs_leave_is_described_without_them(
    round_by_round: Setting, monkeypatch: pytest.MonkeyPatch, expected: Expected, error: Exception
) -> None:
    setting = round_by_round
    whole, search, beside = expected(setting), setting.search(), []

    def short(*_: Any) -> None:
        if search.packs.count:
            beside.extend(slot.progress for slot in search.slots)
            raise error from (MemoryError() if isinstance(error, UserError) else None)

    watch(monkeypatch, trial_registry, "probe", short)
    assert search.run(never)
    assert 0 < max(beside) < 1 and not why_failed(setting.study())  # in the middle of a segment
    assert values_of(setting) == whole


@pytest.mark.slow
def test_trial_that_no_memory_describes_fails_once_no_pack_holds_any(
    side_by_side: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = side_by_side.search()
    counts: dict[nn.Module, list[int]] = {}

    def short(template: nn.Module, *_: Any) -> None:
        if getattr(template, "bias", None) is None:
            counts.setdefault(template, []).append(search.packs.count)
            raise MemoryError

    watch(monkeypatch, trial_registry, "probe", short)
    assert search.run(never)
    assert why_failed(side_by_side.study()) == dict.fromkeys(range(3, 9), "MemoryError")
    assert max(map(max, counts.values())) > 0
    assert {each[-1] for each in counts.values()} == {0}


@pytest.mark.slow
def test_width_of_a_kind_is_found_in_all_of_the_memory(
    round_by_round: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, counts = round_by_round, []
    setting.space = ONE_SIZE
    search = setting.search()

    def bounded(*args: Any) -> None:
        counts.append((search.packs.count, args[-2](), search.packs.count))  # it makes room

    watch(monkeypatch, trial_registry, "measured_width", bounded)
    assert search.run(never)
    assert counts[0] == (0, False, 0) and counts[1] in ((1, True, 0), (2, True, 0)) and len(counts) == 2
    assert len(setting.finished) == len(set(setting.finished)) == 13


@pytest.mark.slow
def test_stop_while_packs_have_made_room_keeps_where_segments_stand(
    round_by_round: Setting, monkeypatch: pytest.MonkeyPatch, expected: Expected
) -> None:
    setting, signals = round_by_round, []
    whole, search = expected(setting), setting.search()

    def signal(*args: Any) -> None:
        if any(0 < slot.progress < 1 for slot in search.slots) and args[-2]():
            signals.append("SIGTERM")

    with monkeypatch.context() as patched:
        watch(patched, trial_registry, "measured_width", signal)
        assert not search.run(lambda: bool(signals))
    later = setting.search()
    assert later.run(never)
    assert search.spent.samples + later.spent.samples == search.num_samples * (9 * 1 + 3 * 2 + 1 * 6)
    assert values_of(setting) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most_samples", "batches"), [(30, [30]), pytest.param(10, [30, 15, 7], marks=pytest.mark.long)]
)
def test_trial_that_cannot_be_measured_in_the_memory_packs_leave_is_measured_without_them(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, expected: Expected, most_samples: int, batches: list[int]
) -> None:
    whole = expected(setting)
    search = setting.search()
    sizes: list[int] = []

    def short(evaluator: Evaluator, *_: Any) -> None:
        evaluator.batch_size = min(30, evaluator.batch_size)  # as many as there are
        if not search.packs.count:
            sizes.append(evaluator.batch_size)
        if search.packs.count or evaluator.batch_size > most_samples:
            raise torch.OutOfMemoryError("CUDA out of memory")

    watch(monkeypatch, Evaluator, "evaluate", short)
    assert search.run(never)
    assert sizes[: len(batches)] == batches and len(sizes) == len(batches) * 13
    assert not why_failed(setting.study()) and any("evaluation" in message for message in setting.messages)
    ours = setting.study().results()
    assert all(ours[each] == pytest.approx(value) for each, (value, _) in whole.items())


@pytest.mark.slow
@pytest.mark.long
def test_trial_that_no_memory_measures_fails(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.space = ONE_SIZE
    setting.make = lambda trial: partial(nn.Linear, 4, 3, bias=trial not in (1, 3))
    search = setting.search()
    counts: list[int] = []

    def short(evaluator: Evaluator, *_: Any) -> None:
        if getattr(evaluator.template, "bias", None) is None:
            counts.append(search.packs.count)
            raise MemoryError

    watch(monkeypatch, Evaluator, "evaluate", short)
    assert search.run(never)
    assert why_failed(setting.study()) == dict.fromkeys((1, 3), "its evaluation failed: MemoryError")
    assert counts[0] > 0 and counts[-1] == 0
