"""Schedules: values worked out by hand on an epoch of 100 samples, drops exactly on their sample, bad input."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import from_mapping, to_mapping
from crossbow_py.train.schedules import SCHEDULES, Constant, Cosine, Exponential, Inverse, MultiStep, Schedule, Step

CONF = Path(__file__).parents[3] / "conf" / "schedule"
EPOCH = 100


def factors(schedule: Schedule, *samples: int, total: int | None = None) -> list[float]:
    return [schedule.factor(seen, EPOCH, total) for seen in samples]


@pytest.mark.parametrize("name", sorted({path.stem for path in CONF.glob("*.yaml")} - SCHEDULES.keys()))
def test_recipe_in_conf_names_a_schedule_and_settings_it_takes(name: str) -> None:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    schedule = from_mapping(SCHEDULES[values.pop("name")], values, "schedule")
    assert to_mapping(schedule).items() >= values.items()


@pytest.mark.parametrize("name", SCHEDULES)
def test_defaults_in_conf_equal_those_of_the_settings(name: str) -> None:
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert values.pop("name") == name == SCHEDULES[name].NAME
    assert values == to_mapping(SCHEDULES[name]())
    assert from_mapping(SCHEDULES[name], values, "schedule") == SCHEDULES[name]()


def test_constant_is_one_throughout() -> None:
    assert factors(Constant(), 0, 1, 10**9) == [1, 1, 1]


def test_multistep_drops_on_the_sample_that_ends_its_epoch() -> None:
    schedule = MultiStep(milestones=(1, 2.5), gamma=0.1)
    assert factors(schedule, 0, 99, 100, 249, 250, 10**6) == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_step_drops_every_so_many_epochs() -> None:
    assert factors(Step(every_epochs=2, gamma=0.5), 199, 200, 399, 400, 1000) == [1, 0.5, 0.5, 0.25, 0.5**5]


def test_step_of_a_fraction_that_is_not_exact_in_binary_drops_on_the_whole_sample() -> None:
    # 0.7 * 10 is 7.000000000000001 in floating point
    assert [Step(every_epochs=0.7, gamma=0.5).factor(seen, 10, None) for seen in (6, 7, 13, 14)] == [1, 0.5, 0.5, 0.25]


def test_cosine_falls_to_its_final_factor_and_stays_there() -> None:
    schedule = Cosine(final_factor=0.2)
    expected = [1, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, 0.6, 0.2, 0.2]
    assert factors(schedule, 0, 100, 200, 400, 900, total=400) == pytest.approx(expected)


def test_cosine_with_epochs_of_its_own_ignores_the_length_of_the_run() -> None:
    assert factors(Cosine(epochs=2), 100, 200, total=1000) == pytest.approx([0.5, 0])
    assert factors(Cosine(epochs=2), 100) == pytest.approx([0.5])


def test_cosine_without_any_length_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"^schedule=cosine needs the length .*max_samples.*schedule\.epochs; set one"):
        Cosine().factor(0, EPOCH, None)


def test_inverse_follows_caffes_inv_in_epochs() -> None:
    assert factors(Inverse(gamma=0.5, power=2), 0, 200, 600) == pytest.approx([1, 1 / 4, 1 / 16])


def test_exponential_multiplies_by_gamma_an_epoch() -> None:
    assert factors(Exponential(gamma=0.25), 0, 50, 100, 200) == pytest.approx([1, 0.5, 0.25, 0.0625])


def test_warmup_rises_linearly_and_never_starts_at_zero() -> None:
    schedule = Constant(warmup_epochs=0.5)
    assert factors(schedule, 0, 24, 49, 50, 1000) == pytest.approx([1 / 50, 0.5, 1, 1, 1])


def test_warmup_multiplies_what_it_runs_into() -> None:
    assert factors(Exponential(gamma=0.25, warmup_epochs=2), 50) == pytest.approx([0.5 * 51 / 200])


@pytest.mark.parametrize(
    ("before", "after", "drops"), [(0, 99, False), (99, 100, True), (100, 101, False), (100, 200, True), (0, 500, True)]
)
def test_drops_between_counts_the_end_but_not_the_start(before: int, after: int, drops: bool) -> None:
    assert MultiStep(milestones=(1, 2)).drops_between(before, after, EPOCH) is drops


def test_drops_between_is_false_without_a_step_down() -> None:
    smooth = (Constant(), Cosine(), Inverse(), Exponential(), Constant(warmup_epochs=1))
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
