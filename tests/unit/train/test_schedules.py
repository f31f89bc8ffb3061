"""Schedules: values worked out by hand on an epoch of 100 samples, drops exactly on their sample, bad input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import from_mapping
from crossbow_py.train.schedules import (
    SCHEDULES,
    WSD,
    Constant,
    Cosine,
    Exponential,
    Inverse,
    MultiStep,
    Schedule,
    Step,
)

EPOCH = 100


@pytest.mark.parametrize(
    ("schedule", "total", "expected"),
    [
        (Constant(), None, {0: 1, 1: 1, 10**9: 1}),
        (MultiStep(milestones=(1, 2.5), gamma=0.1), None, {0: 1, 99: 1, 100: 0.1, 249: 0.1, 250: 0.01, 10**6: 0.01}),
        (Step(every_epochs=2, gamma=0.5), None, {199: 1, 200: 0.5, 399: 0.5, 400: 0.25, 1000: 0.5**5}),
        # 0.07 * 100 is 7.000000000000001 in floating point
        (Step(every_epochs=0.07, gamma=0.5), None, {6: 1, 7: 0.5, 13: 0.5, 14: 0.25}),
        (
            Cosine(final_factor=0.2), 400,
            {0: 1, 100: 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, 200: 0.6, 400: 0.2, 900: 0.2},
        ),
        (Cosine(epochs=2), 1000, {100: 0.5, 200: 0}),
        (Cosine(epochs=2), None, {100: 0.5}),
        (WSD(), 1000, {0: 1, 800: 1, 850: 0.75, 950: 0.25, 1000: 0, 1100: 0}),
        (WSD(cooldown=1), 400, {0: 1, 100: 0.75, 400: 0}),
        (WSD(cooldown=0.5, final_factor=0.2, warmup_epochs=1), 1000, {49: 0.5, 500: 1, 750: 0.6, 1000: 0.2, 2000: 0.2}),
        (Inverse(gamma=0.5, power=2), None, {0: 1, 200: 1 / 4, 600: 1 / 16}),
        (Exponential(gamma=0.25), None, {0: 1, 50: 0.5, 100: 0.25, 200: 0.0625}),
        (Constant(warmup_epochs=0.5), None, {0: 1 / 50, 24: 0.5, 49: 1, 50: 1, 1000: 1}),
        (Exponential(gamma=0.25, warmup_epochs=2), None, {50: 0.5 * 51 / 200}),
    ],
)  # fmt: skip
def test_factor_is_as_worked_out_by_hand(schedule: Schedule, total: int | None, expected: dict[int, float]) -> None:
    assert [schedule.factor(seen, EPOCH, total) for seen in expected] == pytest.approx(list(expected.values()))


def test_cosine_without_any_length_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"^schedule=cosine needs the length .*max_samples.*schedule\.epochs; set one"):
        Cosine().factor(0, EPOCH, None)


def test_wsd_without_any_length_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"^schedule=wsd needs the length .*max_epochs nor max_samples; set one"):
        WSD().factor(0, EPOCH, None)


@pytest.mark.parametrize(
    ("warmup", "cooldown", "told"),
    [(1, 0.2, None), (8, 0.2, None), (8.5, 0.2, "within the warm-up of 8.5"), (6, 0.5, "0.5")],
)
def test_wsd_that_falls_before_it_is_warm_is_told(warmup: float, cooldown: float, told: str | None) -> None:
    remark = WSD(warmup_epochs=warmup, cooldown=cooldown).remark(10)
    assert (remark is None) if told is None else (remark is not None and told in remark)


def test_drops_between_is_false_without_a_step_down() -> None:
    smooth = (Constant(), Cosine(), WSD(), Inverse(), Exponential(), Constant(warmup_epochs=1))
    assert not any(schedule.drops_between(0, 10_000, EPOCH) for schedule in smooth)
    assert not Step(every_epochs=1, gamma=1.0).drops_between(0, 10_000, EPOCH)


@given(st.integers(0, 500), st.integers(1, 200), st.floats(0.01, 3.0))
def test_drops_between_is_true_exactly_when_the_factor_falls(before: int, seen: int, every: float) -> None:
    schedule = Step(every_epochs=every, gamma=0.5)
    fell = schedule.factor(before + seen, EPOCH, None) < schedule.factor(before, EPOCH, None)
    assert schedule.drops_between(before, before + seen, EPOCH) == fell


@pytest.mark.parametrize("milestones", [(), (2, 1), (1, 1)])
def test_milestones_that_do_not_rise_are_refused(milestones: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=r"^schedule\.milestones must be rising epochs"):
        MultiStep(milestones=milestones)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("multistep", {"milestones": [0, 5]}, r"schedule\.milestones must be greater than 0"),
        ("multistep", {"gamma": -0.1}, r"schedule\.gamma must be greater than 0"),
        ("step", {"every_epochs": 0}, r"schedule\.every_epochs must be greater than 0"),
        ("cosine", {"final_factor": 1.5}, r"schedule\.final_factor must be at most 1"),
        ("inverse", {"gamma": -1}, r"schedule\.gamma must be at least 0"),
        ("constant", {"warmup_epochs": -1}, r"schedule\.warmup_epochs must be at least 0"),
        ("constant", {"warmup": 1}, r"unknown key schedule\.warmup; did you mean 'schedule\.warmup_epochs'"),
    ],
)
def test_values_outside_their_limits_are_refused(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_mapping(SCHEDULES[name], values, "schedule")
