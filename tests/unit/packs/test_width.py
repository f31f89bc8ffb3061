"""How wide packs are: the rule on measured numbers, and what is measured and remembered."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from crossbow_py import SGD
from crossbow_py.data.build import make_feed
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.packs import width as module
from crossbow_py.packs.trial import TrialSettings
from crossbow_py.packs.width import CompatibleTrials, choose_width, measured_width
from crossbow_py.schedules import Constant
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.tuning.calibration import Calibration, Candidate, Effort, Refusal
from tests.caches import use_cache
from tests.trainers import blobs
from tests.unit.search.tiny_search import watch

RATES = {
    ("serial", 1): 100.0,
    ("threads", 1): 90.0,
    ("threads", 2): 150.0,
    ("fused", 4): 240.0,
    ("fused", 8): 300.0,
    ("fused", 16): 310.0,
}


@pytest.mark.parametrize(
    ("rates", "size", "executor", "said"),
    [
        # 300 is within 5 % of 310, 240 is not
        (RATES, 8, "fused", "in packs of 8 by executor fused: 300 images/s, and 100 one at a time (3.0 times)"),
        (
            {("serial", 1): 100.0, ("fused", 2): 104.0, ("fused", 4): 90.0}, 1, "serial",
            "one at a time, as packing does not pay: 104 images/s at best, and 100 one at a time",
        ),
        ({("fused", 4): 90.0, ("threads", 2): 80.0}, 4, "fused", "in packs of 4 by executor fused: 90 images/s"),
        (
            {("serial", 1): 90.0, ("threads", 1): 100.0, ("fused", 1): 95.0}, 1, "threads",
            "one at a time, as was asked for, by executor threads: 100 images/s",
        ),
        (
            {("serial", 1): 10.0, ("fused", 8): 96.0, ("threads", 8): 97.0, ("fused", 16): 100.0}, 8, "threads",
            "in packs of 8 by executor threads: 97 images/s, and 10 one at a time (9.7 times)",
        ),
    ],
)  # fmt: skip
def test_width_is_the_smallest_pack_close_to_the_best_by_its_fastest_executor(
    rates: dict[tuple[str, int], float], size: int, executor: str, said: str
) -> None:
    width = choose_width(rates, "mlp", 32)
    assert (width.size, width.executor(size), width.sentence) == (size, executor, f"Trials of mlp run {said}.")


def test_ratio_that_a_busy_machine_measured_is_not_said() -> None:
    """Catches "220 times", which other programs made."""
    width = choose_width({("serial", 1): 1.0, ("fused", 8): 220.0}, "mlp", 8, is_busy=True)
    assert width.sentence.endswith("220 images/s, and 1 one at a time.")


@pytest.mark.parametrize(("bound", "size"), [(8, 8), (9, 9), (10, 10), (11, 8), (32, 8)])
def test_pack_that_takes_nearly_all_trials_takes_all(bound: int, size: int) -> None:
    width = choose_width({("serial", 1): 100.0, ("fused", 8): 300.0}, "mlp", bound)
    assert width.size == size and width.executor(size) == "fused"
    assert f"in packs of {size} by executor fused: 300 images/s, and 100 one at a time (3.0 times)" in width.sentence


def test_round_of_a_pack_between_two_that_were_measured_takes_a_time_between_theirs() -> None:
    rates = {("fused", 2): 100.0, ("fused", 8): 200.0, ("threads", 2): 150.0, ("serial", 1): 10.0}
    width = choose_width(rates, "mlp", 32)
    # A round of 5 fused trials takes (2/100 + 8/200) / 2 = 0.03 s: 167 images/s. One of 4: 20/600 s: 150.
    assert [width.executor(trials) for trials in (2, 4, 5, 8, 20)] == ["threads", "fused", "fused", "fused", "fused"]
    assert choose_width({("fused", 8): 240.0, ("threads", 2): 100.0}, "mlp", 32).executor(3) == "threads"  # 240 · 3/8


def test_executor_measured_with_more_trials_alone_counts_for_their_share() -> None:
    width = choose_width({("serial", 1): 100.0, ("fused", 8): 240.0}, "mlp", 32)
    # A round of one fused trial is taken for 1/60, so one of 2 for 1/60 + (8/240 − 1/60)/7: 105 images/s.
    assert width.executor(1) == "serial"
    assert width.executor(2) == "fused"


class Asked(list[list[tuple[str, int]]]):
    """What was measured, each time; `found`, or 10 images/s a trial and twice that fused."""

    found: Calibration | None = None
    bounds: Iterator[int] | None = None  # how many trials memory holds, each time it is asked

    def calibrate(self, candidates: list[Candidate], *_: Any, **__: Any) -> Calibration:
        self.append([(each.executor, each.num_learners) for each in candidates])
        if self.found is not None:
            return self.found
        for each in candidates:
            executor, plan = each.build()  # the very parts
            executor.submit(plan(0))
            executor.drain()
            executor.close()
        return Calibration("fused", {key: 10.0 * key[1] * (1 + (key[0] == "fused")) for key in self[-1]})

    def memory_bound(self, *args: Any) -> tuple[int, list[str]]:
        if self.bounds is None:
            return memory_bound(*args)
        bound = next(self.bounds)
        return bound, [f"Memory holds {bound}."]


memory_bound = module._memory_bound


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    use_cache(tmp_path, monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    calls = Asked()
    monkeypatch.setattr(module, "calibrate", calls.calibrate)
    monkeypatch.setattr(module, "_memory_bound", calls.memory_bound)
    return calls


def measure(
    limit: int,
    executor: str = "auto",
    told: list[str] | None = None,
    model: Callable[[], nn.Module] = lambda: nn.Linear(4, 3),
    effort: Effort | None = None,
    make_room: Callable[[], bool] | None = None,
) -> Any:
    trial = TrialSettings(0, model, "linear", 4, SGD(), Constant(), name="linear")
    choices = Choices(torch.device("cpu"), FP32, executor)
    feed = make_feed(blobs(40), 4)
    said = [] if told is None else told
    return measured_width(
        CompatibleTrials(RunSettings(device="cpu"), choices, trial, trial.new_model(), feed, cross_entropy),
        limit,
        said.append,
        make_room is not None,
        make_room or (lambda: False),
        effort or Effort(),
    )


def test_measuring_tries_every_executor_alone_and_in_packs_up_to_the_limit(asked: Asked) -> None:
    width, notes = measure(6)
    first = [("serial", 1), ("fused", 6), ("fused_threads", 6), ("threads", 2)]  # what may gain most
    alone = [("threads", 1), ("fused", 1), ("fused_threads", 1)]
    rest = [("fused", 4), ("fused_threads", 4), ("threads", 4), ("fused", 2), ("fused_threads", 2), ("threads", 6)]
    assert asked == [[*first, *alone, *rest]]
    assert width.size == 6 and notes == []


def test_measured_width_is_remembered_for_the_same_trials(asked: Asked) -> None:
    told: list[str] = []
    first, _ = measure(4, told=told)
    again, _ = measure(4, told=told)
    assert first == again and len(asked) == 1 and len(told) == 1
    measure(2)
    assert len(asked) == 2


def test_rate_of_dropout_is_nothing_that_packs_are_measured_anew_for(asked: Asked) -> None:
    for model in (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.25)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)),
    ):
        measure(4, model=model)
    assert len(asked) == 1
    measure(4, model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)))
    assert len(asked) == 2


def test_packs_are_guessed_where_no_time_is_left_or_nothing_is_to_compare(asked: Asked) -> None:
    class Branches(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs if inputs.sum() > 0 else -inputs)

    none = Effort(0.0)
    width, _ = measure(32, effort=none)
    assert (width.size, width.executor(16)) == (32, "fused")
    width, _ = measure(32, effort=none, model=lambda: nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 3)))
    assert (width.size, width.executor(16)) == (16, "fused")  # of larger models
    assert width.sentence.endswith("by executor fused, which is not measured, as there is little to train.")
    width, _ = measure(32, effort=none, model=lambda: Branches(4, 3))
    assert (width.size, width.executor(2)) == (2, "threads")
    width, _ = measure(1, "serial")
    assert width.size == 1 and width.sentence.endswith("one at a time by executor serial, as was asked for.")
    assert asked == []


def test_pack_is_guessed_where_there_was_time_for_one_trial_alone(asked: Asked) -> None:
    late = (("threads", 2), ("threads", 4), ("fused", 32), ("fused_threads", 32))
    alone = Calibration("serial", {("serial", 1): 10.0}, late=late, is_short=True)
    asked.found = alone
    width, _ = measure(32, effort=Effort(20.0, total_samples=100))
    assert width.size == 32 and "not measured" in width.sentence
    refused = {(name, 32): Refusal("no such graph") for name in ("fused", "fused_threads")}
    asked.found = dataclasses.replace(alone, refused=refused, late=late[:2])
    width, _ = measure(32, effort=Effort(20.0, total_samples=100))
    assert (width.size, width.executor(2)) == (2, "threads")  # not one that cannot run


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


MEMORY = Refusal("CUDA out of memory.", is_passing=True)


@pytest.mark.parametrize(
    ("found", "why", "num_measured"),
    [
        (
            {"refused": {("threads", 2): Refusal("no kernel."), ("fused", 16): Refusal("no export")}},
            "no packs of them could be measured (executor threads: no kernel; executor fused: no export)",
            1,  # the next time it is known
        ),
        (
            {"refused": {("fused", 16): MEMORY}},
            "no packs of them could be measured (executor fused: CUDA out of memory)",
            2,  # memory may be there the next time
        ),
        (
            {"late": (("fused", 16), ("fused", 8))},
            "no packs of them could be measured (executor fused: measuring with 8 learners takes too long)",
            2,
        ),
    ],
)
def test_trials_run_one_at_a_time_for_the_reason_that_is_said(
    asked: Asked, found: dict[str, Any], why: str, num_measured: int
) -> None:
    asked.found = Calibration("serial", {("serial", 1): 10.0, ("fused", 1): 9.0}, **found)
    for _ in range(2):
        width, notes = measure(32)
        assert width.size == 1 and notes == []
        assert width.sentence == (
            f"Trials of linear with batches of 4 run one at a time, as {why}, by executor serial: 10 images/s."
        )
    assert len(asked) == num_measured


def test_width_without_packs_says_that_they_were_not_asked_for_or_that_memory_holds_none(asked: Asked) -> None:
    assert "one at a time, as was asked for, by executor fused" in measure(1)[0].sentence
    asked.bounds = itertools.repeat(1)
    width, notes = measure(2)
    assert "one at a time, as memory holds no more, by executor fused" in width.sentence
    assert notes == ["Memory holds 1."]
    assert measure(2, "serial")[0].sentence.endswith("one at a time by executor serial, as memory holds no more.")


def test_executor_that_runs_no_packs_is_named_with_the_reason(asked: Asked) -> None:
    rates = {("serial", 1): 10.0, ("fused", 1): 10.0, ("threads", 2): 20.0}
    asked.found = Calibration("threads", rates, {("fused", 16): MEMORY}, late=(("fused_threads", 16),))
    width, notes = measure(32)
    assert (width.size, width.executor(2)) == (2, "threads")
    assert notes == [
        "Executor fused_threads runs no packs of linear with batches of 4: "
        "measuring with 16 learners takes too long.",
        "Executor fused runs no packs of linear with batches of 4: CUDA out of memory.",
    ]
    measure(32)
    assert len(asked) == 2  # memory may be there the next time


def test_what_was_measured_beside_other_programs_is_not_remembered(asked: Asked) -> None:
    asked.found = Calibration("fused", {("serial", 1): 10.0, ("fused", 4): 80.0}, others=0.5)
    width, notes = measure(4)
    assert width.size == 4
    assert notes == ["Other programs took 50% of the cores meanwhile: it is measured again the next time."]
    measure(4)
    assert len(asked) == 2


def test_what_a_short_search_measured_is_remembered_for_short_ones(asked: Asked) -> None:
    rates = {("serial", 1): 10.0, ("fused", 4): 80.0}
    asked.found = Calibration("fused", rates, late=(("fused", 16),), is_short=True)
    first, _ = measure(4, effort=Effort(20.0, total_samples=800))  # a second
    again, _ = measure(4, effort=Effort(20.0, total_samples=400))
    assert first == again and len(asked) == 1
    measure(4, effort=Effort(20.0, total_samples=80_000))
    assert len(asked) == 2


@pytest.mark.slow
def test_what_was_measured_beside_other_workers_of_the_search_is_remembered_for_that(asked: Asked) -> None:
    beside = Effort(is_alone=False)
    measure(4, effort=beside)
    measure(4, effort=beside)
    assert len(asked) == 1
    measure(4)
    assert len(asked) == 2


def test_width_that_memory_bounds_is_bounded_anew_where_there_is_room_to_be_made(asked: Asked) -> None:
    room: list[str] = []
    asked.bounds = (8 if room else 2 for _ in itertools.count())
    width, notes = measure(8, effort=Effort(is_alone=False))
    assert (width.size, notes) == (2, ["Memory holds 2."])  # nothing is given back
    width, notes = measure(8, make_room=lambda: room.append("made") or True)
    assert (width.size, notes, room) == (8, ["Memory holds 8."], ["made"])
    measure(8, make_room=lambda: pytest.fail("memory is not short"))


def test_width_that_is_remembered_parks_no_packs(asked: Asked) -> None:
    asked.bounds = iter((8, 2))
    first, _ = measure(16)
    again, notes = measure(16, make_room=lambda: pytest.fail("nothing is measured"))
    assert first == again and first.size == 8 and notes == []  # what memory holds without the packs
    assert len(asked) == 1


@pytest.mark.slow
def test_width_is_remembered_whatever_memory_is_free_as_long_as_it_is_no_more(asked: Asked) -> None:
    asked.bounds = iter((27, 25, 31, 5, 33))
    widths = [measure(64)[0] for _ in range(4)]
    assert [width.size for width in widths] == [24, 24, 24, 4] and len(asked) == 1
    assert max(count for _, count in widths[-1].rates) == 4
    assert measure(64)[0].size == 32 and len(asked) == 2  # memory holds more


def test_packs_below_the_size_that_memory_refuses_are_remembered(asked: Asked) -> None:
    rates = {("serial", 1): 10.0, ("fused", 16): 160.0, ("fused", 32): 320.0}
    asked.found = Calibration("fused", rates, {("fused", 40): MEMORY})
    for _ in range(2):
        assert measure(40)[0].size == 32  # not nearly all, which memory refused
    assert len(asked) == 1
    for _ in range(2):
        measure(40, effort=Effort(is_alone=False))  # others may have had the memory
    assert len(asked) == 3


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("late", "num_measured"), [((), 2), ((("fused", 4),), 3)])
def test_packs_that_memory_refused_are_measured_again_in_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, late: tuple[tuple[str, int], ...], num_measured: int
) -> None:
    clock, calls = Clock(), []
    monkeypatch.setattr(module, "time", clock)
    short = Calibration("serial", {("serial", 1): 10.0}, {("fused", 8): MEMORY}, others=0.1)
    ample = Calibration("fused", {("serial", 1): 10.0, ("fused", 8): 80.0}, late=late)

    def calibrate(
        _: Any, batch_size: int, device: Any, effort: Effort, known: Any = None, announce: Any = None
    ) -> Calibration:
        calls.append((effort.budget_s, effort.spent_s, known))
        clock.now += 15
        return short if len(calls) == 1 else ample

    monkeypatch.setattr(module, "calibrate", calibrate)
    effort = Effort(20.0, spent_s=1.0)
    assert measure(8, make_room=lambda: True, effort=effort)[0].size == 8
    assert calls == [(20.0, 1.0, None), (5.0, 16.0, short.images_per_s)]
    measure(8, effort=effort)
    assert len(calls) == num_measured  # not remembered where the rest of the time was too short


def test_packs_of_more_than_32_are_measured_where_those_of_32_gained(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.found = Calibration("fused", {("serial", 1): 10.0, ("fused", 64): 640.0})
    gains: list[int] = []
    watch(monkeypatch, asked, "calibrate", lambda each, *_: gains.extend(e.num_learners for e in each if e.needs_gain))
    monkeypatch.setattr(module, "calibrate", asked.calibrate)
    width, _ = measure(128)
    assert width.size == 64
    assert [count for name, count in asked[0] if name == "fused"] == [32, 1, 16, 8, 64, 128, 4, 2]
    assert set(gains) == {64, 128}
    assert module.asked(["streams"], 64) == [("streams", size) for size in (1, 16, 8, 32, 64, 4, 2)]
    assert max(count for name, count in module.asked(["threads"], 64) if name == "threads") == 8


def test_executor_that_was_asked_for_is_the_only_one(asked: Asked) -> None:
    measure(2, "threads")
    measure(2, "serial")
    measure(2, "fused")
    assert asked == [[(name, 1), (name, 2)] for name in ("threads", "serial", "fused")]


def test_trial_alone_goes_by_what_two_take_where_the_executor_for_one_collapses() -> None:
    # On cores that others use, two threads a model lose by ten and more to one: a round of two trials takes 1.6 ms.
    found = choose_width({("serial", 1): 100.0, ("threads", 2): 20_000.0}, "mlp", bound=27)
    assert found.executor(1) == "threads"
    quiet = choose_width({("serial", 1): 12_000.0, ("threads", 2): 20_000.0}, "mlp", bound=27)
    assert quiet.executor(1) == "serial"
