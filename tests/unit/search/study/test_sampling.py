"""Trials' parameters: what they follow from."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import BaseSampler, QMCSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from crossbow_py.core.errors import UserError
from crossbow_py.search.space import Space
from crossbow_py.search.study.sampling import Sampling, at_one_rung
from crossbow_py.search.study.storage import silence_optuna

SPACE = Space.from_mapping(
    {
        "rate": {"low": 0.001, "high": 0.5, "log": True, "num": 3},
        "rule": ["sgd", None, True],
        "momentum": {"low": 0.0, "high": 0.9, "step": 0.3, "when": {"rule": "sgd"}},
        "layers": {"low": 1, "high": 3},
    }
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    silence_optuna()


def sampling(sampler: str, seed: int = 1) -> Sampling:
    return Sampling(SPACE, sampler, seed, True)


def history(rates: dict[float, float | None]) -> list[FrozenTrial]:
    """Trials by learning rate, with a value or still running."""
    trials = []
    for trial, (rate, value) in enumerate(rates.items()):
        record = sampling("random").sampled(trial, [])
        params = {**record.params, "rate": rate}
        state = TrialState.RUNNING if value is None else TrialState.COMPLETE
        trials.append(
            create_trial(
                state=state, value=value, params=params, distributions=record.distributions, user_attrs={"trial": trial}
            )
        )
    return trials


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_trial_of_random_and_grid_follows_from_seed_and_number_alone(sampler: str) -> None:
    asked = [sampling(sampler).sampled(trial, []) for trial in range(8)]
    again = sampling(sampler)
    for trial in reversed(range(8)):
        assert again.sampled(trial, history({0.01: 0.9, 0.02: None})).params == asked[trial].params
    assert len({str(each.params) for each in asked}) == 8
    assert [each.user_attrs for each in asked] == [{"trial": trial} for trial in range(8)]
    assert all(each.state is TrialState.RUNNING for each in asked)


def test_trials_of_grid_are_its_points_exactly() -> None:
    points = SPACE.grid()
    assert len(points) == 3 * 3 * (4 + 1 + 1)
    asked = [sampling("grid").sampled(trial, []).params for trial in range(len(points))]
    assert asked == points
    assert [[type(value) for value in each.values()] for each in asked] == [
        [type(value) for value in each.values()] for each in points
    ]


def test_trial_beyond_the_grid_is_refused() -> None:
    with pytest.raises(AssertionError, match="the grid has 54 points, and point 54 was asked for"):
        sampling("grid").sampled(54, [])


def after_a_rung(maximize: bool) -> list[FrozenTrial]:
    """27 trials at a rung, the better the lower their rates: the best nine go on, and the others were pruned."""
    trials = []
    for trial in range(27):
        value = trial / 27 * (-1 if maximize else 1)
        record = sampling("random").sampled(trial, [])
        trials.append(
            create_trial(
                state=TrialState.RUNNING if trial < 9 else TrialState.PRUNED,
                params={**record.params, "rate": 0.001 * 1.25**trial},
                distributions=record.distributions,
                intermediate_values={1000: value},
            )
        )
    return trials


@pytest.mark.parametrize("maximize", [False, True])
def test_trials_of_tpe_gather_around_those_that_were_promoted_and_still_run(maximize: bool) -> None:
    known = after_a_rung(maximize)
    asked = [Sampling(SPACE, "tpe", seed, maximize).sampled(27, known).params["rate"] for seed in range(24)]
    assert sum(rate < 0.001 * 1.25**8.5 for rate in asked) >= 20  # a third of the range
    assert {record.state for record in known} == {TrialState.RUNNING, TrialState.PRUNED}  # the search's own


@pytest.mark.parametrize("maximize", [False, True])
def test_trials_of_tpe_gather_around_what_got_further_whatever_its_value(maximize: bool) -> None:
    """Of trials that all go on, three were measured once more; there they were worse than any other before."""
    known = []
    for trial in range(27):
        record = sampling("random").sampled(trial, [])
        first, second = {1000: 0.5}, {3000: 0.1 if maximize else 0.9}
        known.append(
            create_trial(
                state=TrialState.RUNNING,
                params={**record.params, "rate": 0.001 * 1.25**trial},
                distributions=record.distributions,
                intermediate_values={**first, **(second if trial > 23 else {})},
            )
        )
    asked = [Sampling(SPACE, "tpe", seed, maximize).sampled(27, known).params["rate"] for seed in range(24)]
    assert sum(rate > 0.001 * 1.25**18 for rate in asked) >= 20


# --- samplers by other names ------------------------------------------------------------------------------------------

LINE = Space.from_mapping({"x": {"low": 0.0, "high": 1.0}, "y": {"low": 0.0, "high": 1.0}})
MODULE = __name__


def first_trials(sampler: str, number: int, space: Space = LINE, seed: int = 1) -> list[FrozenTrial]:
    """What a search samples that has no value yet, each trial beside those before it."""
    found: list[FrozenTrial] = []
    for trial in range(number):
        found.append(Sampling(space, sampler, seed, True).sampled(trial, found))
    return found


def with_values(records: list[FrozenTrial], value: Callable[[FrozenTrial], float]) -> list[FrozenTrial]:
    """The same, measured at a rung where they were all pruned."""
    return [
        create_trial(
            state=TrialState.PRUNED, params=each.params, distributions=each.distributions, user_attrs=each.user_attrs,
            intermediate_values={1000: value(each)},
        )
        for each in records
    ]  # fmt: skip


def unscrambled(seed: int) -> BaseSampler:
    return QMCSampler(seed=seed)


class Counting(RandomSampler):
    """Gives the number of trials that it was asked for before, from what it wrote into the study."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        return {"x": FloatDistribution(0.0, 1.0)}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        before = study._storage.get_study_system_attrs(study._study_id).get("asked", 0)
        study._storage.set_study_system_attr(study._study_id, "asked", before + 1)
        return {"x": before / 100}


class Values(RandomSampler):
    """Gives the number of trials that ended so far by the values that it knows."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        return {"x": FloatDistribution(0.0, 1.0)}

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        return {"x": sum(each.value or 0.0 for each in study.trials if each.state is TrialState.PRUNED)}


def no_sampler(seed: int) -> int:
    return seed


def broken(seed: int) -> BaseSampler:
    raise ValueError("out of order")


class Broken(RandomSampler):
    """Fails when it is asked."""

    def sample_independent(self, *args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("no more numbers")


def test_sampler_that_remembers_in_the_study_is_asked_for_all_trials_before_once_more() -> None:
    counted = Sampling(LINE, f"{MODULE}.Counting", 1, True)
    known = first_trials(f"{MODULE}.Counting", 5)
    assert [each.params["x"] for each in known] == [0.0, 0.01, 0.02, 0.03, 0.04]
    assert counted.sampled(7, known).params["x"] == 0.07  # others are sampling 5 and 6 at the moment
    assert counted.sampled(3, known).params["x"] == 0.03


def test_sampler_of_the_users_sees_what_was_measured_on_the_way_as_pruned_at_its_last_value() -> None:
    known = with_values(first_trials(f"{MODULE}.Values", 3), lambda each: 0.25)
    going_on = create_trial(
        state=TrialState.RUNNING, params=known[2].params, distributions=known[2].distributions,
        user_attrs={"trial": 2}, intermediate_values={1000: 0.5, 3000: 0.125},
    )  # fmt: skip
    asked = Sampling(LINE, f"{MODULE}.Values", 1, True).sampled(3, [*known[:2], going_on])
    assert asked.params["x"] == 0.25 + 0.25 + 0.125


def test_trial_of_a_sampler_that_remembers_follows_from_the_history_and_its_number_alone() -> None:
    known = with_values(first_trials("random", 52), lambda each: each.params["x"])
    sampler = Sampling(LINE, "nsgaii", 1, True)
    asked = [sampler.sampled(trial, known).params for trial in (52, 53)]
    assert [Sampling(LINE, "nsgaii", 1, True).sampled(trial, known).params for trial in (52, 53)] == asked
    assert asked[0] != asked[1]


def test_values_of_one_rung_are_compared_the_furthest_that_enough_trials_have_reached() -> None:
    records = first_trials("random", 15)

    def at(trial: int, state: TrialState, value: float | None = None, **steps: float) -> FrozenTrial:
        record = records[trial]
        return create_trial(
            state=state, value=value, params=record.params, distributions=record.distributions,
            user_attrs=record.user_attrs, intermediate_values={int(step[1:]): each for step, each in steps.items()},
        )  # fmt: skip

    known = [
        *(at(trial, TrialState.PRUNED, s1000=0.1) for trial in range(5)),
        *(at(trial, TrialState.RUNNING, s1000=0.2, s3000=0.3) for trial in range(5, 9)),
        at(9, TrialState.COMPLETE, 0.9, s9000=0.9),
        at(10, TrialState.FAIL, s1000=0.5),
        at(11, TrialState.RUNNING),
    ]
    states = [(each.state, each.value) for each in at_one_rung(known, 9)]
    complete, pruned = TrialState.COMPLETE, TrialState.PRUNED
    assert states[:9] == [(complete, 0.1)] * 5 + [(complete, 0.2)] * 4
    assert states[9] == (pruned, None)
    assert [state for state, _ in states[10:]] == [TrialState.FAIL, TrialState.RUNNING]
    assert [each.value for each in at_one_rung(known, 4)[5:9]] == [0.3] * 4
    assert at_one_rung(known, 1)[9].value == 0.9
    assert [each.value for each in at_one_rung(known, 100)[:9]] == [0.1] * 5 + [0.2] * 4  # the rung of most
    assert at_one_rung([], 10) == []


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ("no.such.Sampler", "^sampler=no.such.Sampler cannot be imported .ModuleNotFoundError"),
        (f"{MODULE}.LINE", f"^sampler={MODULE}.LINE must be callable, got Space"),
        (f"{MODULE}.no_sampler", f"^sampler={MODULE}.no_sampler must give a sampler of Optuna, got int; derive"),
        (f"{MODULE}.broken", f"^sampler={MODULE}.broken called with seed=[0-9]+ failed with ValueError: out of order;"),
        (f"{MODULE}.Space", f"^sampler={MODULE}.Space called with seed=[0-9]+ failed with TypeError: .*takes a seed"),
    ],
)
def test_sampler_that_is_none_is_the_users_mistake(sampler: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sampling(LINE, sampler, 1, True)


def test_sampler_that_fails_names_itself_and_the_trial() -> None:
    sampler = Sampling(LINE, f"{MODULE}.Broken", 1, True)
    said = f"^sampler={MODULE}.Broken failed with ArithmeticError: no more numbers when it sampled trial 3; correct it"
    with pytest.raises(UserError, match=said):
        sampler.sampled(3, [])


@pytest.mark.parametrize(
    ("sampler", "package"),
    [("gp", "scipy"), ("qmc", "scipy"), ("cmaes", "cmaes"), (f"{MODULE}.unscrambled", "scipy")],
)
def test_sampler_whose_package_is_not_installed_is_refused_with_what_to_install(
    sampler: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else "found")
    said = f"^sampler={sampler} needs {package}, which is not installed; run pip install {package}.$"
    with pytest.raises(UserError, match=said):
        Sampling(LINE, sampler, 1, True)


@pytest.mark.parametrize(("sampler", "package", "number"), [("gp", "scipy", 18), ("cmaes", "cmaes", 40)])
@pytest.mark.parametrize("maximize", [True, False])
def test_trials_of_samplers_that_learn_gather_where_values_are_best(
    sampler: str, package: str, number: int, maximize: bool
) -> None:
    pytest.importorskip(package)
    known: list[FrozenTrial] = []
    sign = 1 if maximize else -1
    for trial in range(number):
        asked = Sampling(LINE, sampler, 1, maximize).sampled(trial, known)
        known += with_values([asked], lambda each: -sign * abs(each.params["x"] - 0.8))
    distances = [abs(each.params["x"] - 0.8) for each in known[-6:]]
    assert sum(distances) / len(distances) < 0.15  # at random it is 0.34


def test_trials_of_named_samplers_with_conditions_and_choices_are_of_the_space_and_no_line_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    samplers = {"gp": "scipy", "cmaes": "cmaes", "qmc": "scipy", "nsgaii": "numpy"}
    for sampler in (name for name, package in samplers.items() if importlib.util.find_spec(package)):
        known = with_values(first_trials(sampler, 12, SPACE), lambda each: each.params["rate"])
        for trial in (12, 13):
            assert SPACE.mistake_in(Sampling(SPACE, sampler, 1, True).sampled(trial, known).params) == ""
    assert capfd.readouterr() == ("", "")


def test_trials_of_nsgaii_inherit_from_others_once_a_population_of_fifty_was_measured_at_a_rung() -> None:
    known = with_values(first_trials("random", 52), lambda each: each.params["x"])
    further = [
        create_trial(
            state=TrialState.RUNNING, params=each.params, distributions=each.distributions, user_attrs=each.user_attrs,
            intermediate_values={**each.intermediate_values, 3000: 0.5},
        )
        for each in known[:40]
    ]  # fmt: skip
    parents = {each.params["x"] for each in known}
    sampler = Sampling(LINE, "nsgaii", 1, True)

    def inherited(history: list[FrozenTrial]) -> int:
        return sum(sampler.sampled(trial, history).params["x"] in parents for trial in range(52, 58))

    assert inherited([*further, *known[40:]]) > 0
    assert inherited([*further, *known[40:49]]) == 0
