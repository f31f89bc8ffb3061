"""Trials' parameters: what they follow from."""

from __future__ import annotations

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from crossbow_py.search.space import Space
from crossbow_py.search.study.storage import silence_optuna
from crossbow_py.search.study.study import SamplerName, Sampling

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


def sampling(sampler: SamplerName, seed: int = 1) -> Sampling:
    return Sampling(SPACE, sampler, seed, True)


def history(rates: dict[float, float | None]) -> list[FrozenTrial]:
    """Trials by learning rate, with a value or still running."""
    trials = []
    for trial, (rate, value) in enumerate(rates.items()):
        record = sampling("random").sampled(trial, [])
        params = {**record.params, "rate": rate}
        state = TrialState.RUNNING if value is None else TrialState.COMPLETE
        trials.append(create_trial(state=state, value=value, params=params, distributions=record.distributions))
    return trials


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_trial_of_random_and_grid_follows_from_seed_and_number_alone(sampler: SamplerName) -> None:
    asked = [sampling(sampler).sampled(trial, []) for trial in range(8)]
    again = sampling(sampler)
    for trial in reversed(range(8)):
        assert again.sampled(trial, history({0.01: 0.9, 0.02: None})).params == asked[trial].params
    assert len({str(each.params) for each in asked}) == 8
    assert [each.user_attrs for each in asked] == [{"trial": trial} for trial in range(8)]
    assert all(each.state is TrialState.RUNNING for each in asked)


def test_trials_of_random_differ_by_seed() -> None:
    assert sampling("random", 1).sampled(0, []).params != sampling("random", 2).sampled(0, []).params


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


def test_trials_of_tpe_gather_where_values_are_best_in_the_searchs_direction() -> None:
    rates: dict[float, float | None] = {0.001 * 1.2**index: -abs(index - 22) / 10 for index in range(30)}
    asked = {
        maximize: [
            Sampling(SPACE, "tpe", seed, maximize).sampled(40, history(rates)).params["rate"] for seed in range(8)
        ]
        for maximize in (True, False)
    }
    assert max(asked[False]) < 0.001 * 1.2**6 < 0.001 * 1.2**12 < min(asked[True])


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


def test_trial_of_tpe_is_the_same_from_the_same_history_only() -> None:
    rates: dict[float, float | None] = {0.001 * (index + 1): index / 20 for index in range(15)}
    asked = sampling("tpe").sampled(15, history(rates))
    assert sampling("tpe").sampled(15, history(rates)).params == asked.params
    turned = {rate: 1 - (value or 0) for rate, value in rates.items()}
    assert sampling("tpe").sampled(15, history(turned)).params != asked.params


def test_trial_of_tpe_keeps_off_those_that_still_run() -> None:
    rates: dict[float, float | None] = {0.001 * 1.4**index: index / 20 for index in range(15)}
    alone = sampling("tpe").sampled(15, history(rates)).params["rate"]
    crowded = sampling("tpe").sampled(15, history({**rates, **{alone * (1 + 0.001 * k): None for k in range(20)}}))
    assert abs(crowded.params["rate"] / alone - 1) > 0.1
