"""Who survives and who trains on, whatever the order of results, and Optuna's pruners beside."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.pruners import BasePruner, HyperbandPruner, SuccessiveHalvingPruner

from crossbow_py.search.hyperband import (
    Bracket,
    Outcome,
    Segment,
    TrialStanding,
    TrialState,
    beaten,
    best,
    is_over,
    is_reached,
    make_brackets,
    ready,
    standing,
    survivors,
)

# 27 trials at 1, 3, 9 and 27 epochs.
HALVING = make_brackets("successive_halving", num_trials=None, min_epochs=1, max_epochs=27, eta=3)
# 9 at 1, 3, 9 epochs; 5 at 3, 9; 3 at 9.
SMALL = make_brackets("hyperband", num_trials=None, min_epochs=1, max_epochs=9, eta=3)


# --- survivors --------------------------------------------------------------------------------------------------------


def test_survivors_are_the_best_and_ties_go_to_the_lower_number() -> None:
    outcomes = {5: 0.7, 1: 0.9, 4: 0.8, 2: 0.7, 3: 0.8, 0: 0.1}
    assert survivors(outcomes, 2, maximize=True) == (1, 3)
    assert survivors(outcomes, 3, maximize=True) == (1, 3, 4)
    assert survivors(outcomes, 4, maximize=True) == (1, 2, 3, 4)
    assert survivors(outcomes, 2, maximize=False) == (0, 2)


def test_survivors_never_include_a_trial_without_a_finite_value() -> None:
    outcomes = {0: math.nan, 1: None, 2: math.inf, 3: -math.inf, 4: 0.5, 5: -0.5}
    for maximize in (True, False):
        assert survivors(outcomes, 4, maximize=maximize) == (4, 5)
        assert survivors({0: math.nan, 1: None}, 1, maximize=maximize) == ()
    assert survivors(outcomes, 1, maximize=True) == (4,)
    assert survivors(outcomes, 1, maximize=False) == (5,)


# --- what may run -----------------------------------------------------------------------------------------------------


def segments(*pairs: tuple[int, int]) -> list[Segment]:
    return [Segment(trial, rung) for trial, rung in pairs]


def accuracy(trial: int, rung: int) -> float:
    """Trial 17i mod 101 grows with every rung; no two trials are equal."""
    return (trial * 17 % 101 + rung) / 200


def finish(
    brackets: Sequence[Bracket],
    value: Callable[[int, int], Outcome],
    choose: Callable[[list[Segment]], Segment] = lambda waiting: waiting[0],
) -> dict[Segment, Outcome]:
    """Run a whole search, one segment after another, each chosen from those that may run."""
    results: dict[Segment, Outcome] = {}
    while waiting := ready(brackets, results, maximize=True):
        segment = choose(waiting)
        results[segment] = value(segment.trial, segment.rung)
    return results


def test_new_search_may_run_the_first_rung_of_every_trial_in_order() -> None:
    assert ready(SMALL, {}, maximize=True) == segments(*((trial, 0) for trial in range(17)))
    assert not is_over(SMALL, {}, maximize=True)


def test_rung_that_lacks_one_result_promotes_nobody() -> None:
    results: dict[Segment, Outcome] = {Segment(trial, 0): trial / 10 for trial in range(8)}
    waiting = ready(SMALL, results, maximize=True)
    assert waiting == segments((8, 0), *((trial, 0) for trial in range(9, 17)))
    assert standing(SMALL, results, maximize=True)[7] == TrialStanding(TrialState.PAUSED, 0, 0.7)


def test_complete_rung_promotes_its_third_before_trials_of_later_brackets_begin() -> None:
    results: dict[Segment, Outcome] = {Segment(trial, 0): trial / 10 for trial in range(9)}
    results[Segment(10, 0)] = 0.5
    waiting = ready(SMALL, results, maximize=True)
    assert waiting == segments((6, 1), (7, 1), (8, 1), (9, 0), (11, 0), (12, 0), (13, 0), (14, 0), (15, 0), (16, 0))
    assert ready(SMALL, results, maximize=False)[:3] == segments((0, 1), (1, 1), (2, 1))


def test_promoted_trials_of_earlier_brackets_come_first() -> None:
    results: dict[Segment, Outcome] = {Segment(trial, 0): trial / 10 for trial in range(14)}
    assert ready(SMALL, results, maximize=True)[:5] == segments((6, 1), (7, 1), (8, 1), (13, 1), (14, 0))


def test_failed_trials_leave_fewer_survivors_and_never_hold_the_others_up() -> None:
    outcomes: list[Outcome] = [None, 0.5, math.nan, None, None, None, 0.4, None, None]
    results = {Segment(trial, 0): outcome for trial, outcome in enumerate(outcomes)}
    assert ready(SMALL, results, maximize=True)[:3] == segments((1, 1), (6, 1), (9, 0))
    results[Segment(1, 1)] = None
    assert ready(SMALL, results, maximize=True)[:2] == segments((6, 1), (9, 0))
    results[Segment(6, 1)] = 0.3
    assert ready(SMALL, results, maximize=True)[:2] == segments((6, 2), (9, 0))


def test_bracket_whose_trials_all_fail_is_over() -> None:
    one = make_brackets("successive_halving", num_trials=3, min_epochs=1, max_epochs=9, eta=3)
    results: dict[Segment, Outcome] = {Segment(trial, 0): None for trial in range(3)}
    assert is_over(one, results, maximize=True)
    assert best(one, results, maximize=True) is None
    failed = TrialStanding(TrialState.FAILED)
    assert standing(one, results, maximize=True) == {0: failed, 1: failed, 2: failed}


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_rung_of_27_keeps_exactly_the_best_third_whatever_the_order(order: str, maximize: bool) -> None:
    results: dict[Segment, Outcome] = {}
    reported = {"rising": list(range(27)), "falling": list(range(26, -1, -1)), "shuffled": shuffled(27)}[order]
    for number, trial in enumerate(reported):
        assert len(ready(HALVING, results, maximize=maximize)) == 27 - number
        results[Segment(trial, 0)] = trial / 100
    expected = range(18, 27) if maximize else range(9)
    assert ready(HALVING, results, maximize=maximize) == segments(*((trial, 1) for trial in expected))


def test_search_run_to_its_end_runs_what_the_table_says() -> None:
    results = finish(SMALL, accuracy)
    per_rung = [
        [sum(segment.rung == rung and segment.trial in bracket.trials for segment in results) for rung in range(3)]
        for bracket in SMALL
    ]
    assert per_rung == [[9, 3, 1], [5, 1, 0], [3, 0, 0]]
    assert is_over(SMALL, results, maximize=True)


@given(st.randoms(use_true_random=False), st.lists(st.integers(-1, 5), min_size=49, max_size=49))
@settings(max_examples=50)
def test_search_ends_alike_whatever_runs_first_and_whoever_ties_or_fails(
    chance: random.Random, grades: list[int]
) -> None:
    brackets = make_brackets("hyperband", num_trials=None, min_epochs=1, max_epochs=27, eta=3)

    def value(trial: int, rung: int) -> Outcome:
        return None if grades[trial] < 0 else float(grades[trial] * (rung + 1))

    expected = finish(brackets, value)
    found = finish(brackets, value, chance.choice)
    assert found == expected
    for given_results in (found, dict(chance.sample(sorted(found.items()), len(found)))):
        assert standing(brackets, given_results, maximize=True) == standing(brackets, expected, maximize=True)
        assert best(brackets, given_results, maximize=True) == best(brackets, expected, maximize=True)


# --- where trials are -------------------------------------------------------------------------------------------------


def test_standing_says_of_every_trial_where_it_is() -> None:
    results: dict[Segment, Outcome] = {Segment(trial, 0): trial / 10 for trial in range(1, 9)}
    results |= {Segment(0, 0): None, Segment(7, 1): 0.75, Segment(8, 1): math.inf, Segment(9, 0): 0.4}
    results[Segment(14, 0)] = 0.95
    found = standing(SMALL, results, maximize=True)
    assert list(found) == list(range(17))
    assert found[0] == TrialStanding(TrialState.FAILED)
    assert found[5] == TrialStanding(TrialState.PRUNED, 0, 0.5)
    assert found[6] == TrialStanding(TrialState.PROMOTED, 0, 0.6)
    assert found[7] == TrialStanding(TrialState.PAUSED, 1, 0.75)
    assert found[8] == TrialStanding(TrialState.FAILED, 0, 0.8)
    assert found[9] == TrialStanding(TrialState.PAUSED, 0, 0.4)
    assert found[10] == TrialStanding(TrialState.WAITING)
    assert found[14] == TrialStanding(TrialState.COMPLETE, 0, 0.95)


def test_standing_of_a_finished_search_is_complete_pruned_or_failed() -> None:
    results = finish(SMALL, lambda trial, rung: None if trial == 9 else accuracy(trial, rung))
    states = [found.state for found in standing(SMALL, results, maximize=True).values()]
    assert {state: states.count(state) for state in states} == {
        TrialState.COMPLETE: 5,  # one of each of the first two brackets and the three of the last
        TrialState.PRUNED: 11,
        TrialState.FAILED: 1,
    }


def test_best_compares_only_values_at_the_most_epochs_reached() -> None:
    results: dict[Segment, Outcome] = {Segment(trial, 0): 0.9 - trial / 100 for trial in range(9)}
    assert best(SMALL, {}, maximize=True) is None
    assert best(SMALL, results, maximize=True) == 0
    assert best(SMALL, results, maximize=False) == 8
    results[Segment(10, 0)] = 0.2  # at 3 epochs
    assert best(SMALL, results, maximize=True) == 10
    results[Segment(1, 1)] = 0.3  # at 3 epochs as well, in another bracket
    assert best(SMALL, results, maximize=True) == 1
    results |= {Segment(16, 0): 0.1, Segment(15, 0): 0.1, Segment(14, 0): math.nan}  # at 9 epochs
    assert best(SMALL, results, maximize=True) == 15


def test_best_is_no_trial_that_failed_whatever_it_reached_before() -> None:
    results: dict[Segment, Outcome] = {Segment(trial, 0): trial / 10 for trial in range(9)}
    results[Segment(8, 1)] = 0.95
    assert best(SMALL, results, maximize=True) == 8
    results |= {Segment(6, 1): 0.7, Segment(7, 1): 0.6, Segment(8, 2): None}
    assert best(SMALL, results, maximize=True) == 6
    failed: dict[Segment, Outcome] = {Segment(0, 0): 0.5, Segment(0, 1): None}
    one = make_brackets("successive_halving", num_trials=1, min_epochs=1, max_epochs=9, eta=3)
    assert best(one, failed, maximize=True) is None


def test_beaten_are_failed_and_pruned_trials_but_for_the_best_of_those_that_have_ended() -> None:
    def found(results: dict[Segment, Outcome]) -> set[int]:
        return beaten(SMALL, standing(SMALL, results, maximize=True), maximize=True)

    results: dict[Segment, Outcome] = {Segment(trial, 0): trial / 10 for trial in range(1, 9)}
    assert found(results) == set()
    results[Segment(0, 0)] = None
    assert found(results) == {0, 1, 2, 3, 4}  # 6, 7 and 8 go on, and may fail: then 5 is the best
    results |= {Segment(6, 1): 0.9, Segment(7, 1): 0.8, Segment(8, 1): 0.7}
    assert found(results) == {0, 1, 2, 3, 4, 5, 8}  # 6 goes on, and 7 was measured where it was
    assert found({**results, Segment(6, 2): None}) == {0, 1, 2, 3, 4, 5, 6, 8}
    assert best(SMALL, {**results, Segment(6, 2): None}, maximize=True) == 7
    assert found({**results, Segment(6, 2): 0.1}) == {0, 1, 2, 3, 4, 5, 7, 8}


@given(st.randoms(use_true_random=False), st.sampled_from([0.1, 0.5, 0.9]))
@settings(max_examples=30)
def test_best_is_never_one_that_was_beaten_before_whoever_fails_in_whatever_order(
    chance: random.Random, share_failed: float
) -> None:
    results: dict[Segment, Outcome] = {}
    lost: set[int] = set()
    while waiting := ready(SMALL, results, maximize=True):
        results[chance.choice(waiting)] = None if chance.random() < share_failed else float(chance.randrange(4))
        now = beaten(SMALL, standing(SMALL, results, maximize=True), maximize=True)
        assert lost <= now and best(SMALL, results, maximize=True) not in now
        lost = now


def test_target_is_reached_only_by_a_trial_at_its_end_which_is_then_the_best() -> None:
    results: dict[Segment, Outcome] = {Segment(trial, 0): trial / 10 for trial in range(9)}
    assert not is_reached(SMALL, results, 0.75)  # 0.8 after 1 epoch of 9
    results[Segment(14, 0)] = 0.7
    assert not is_reached(SMALL, results, 0.75)
    results |= {Segment(15, 0): 0.75, Segment(16, 0): None}
    assert is_reached(SMALL, results, 0.75)
    assert best(SMALL, results, maximize=True) == 15


# --- why not Optuna's pruners -----------------------------------------------------------------------------------------


def shuffled(count: int) -> list[int]:
    numbers = list(range(count))
    random.Random(0).shuffle(numbers)
    return numbers


@pytest.fixture
def _quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(before)


@pytest.mark.usefixtures("_quiet_optuna")
@pytest.mark.parametrize(
    ("make_pruner", "left"),
    [
        (lambda: SuccessiveHalvingPruner(min_resource=1, reduction_factor=3), [27, 1, 12]),
        (lambda: HyperbandPruner(min_resource=1, max_resource=27, reduction_factor=3), [27, 18, 22]),
    ],
)
def test_optuna_pruners_in_lockstep_keep_what_the_order_says_where_nine_should_survive(
    make_pruner: Callable[[], BasePruner], left: list[int]
) -> None:
    found = []
    for values in (range(27), range(26, -1, -1), shuffled(27)):  # rising, falling, shuffled
        study = optuna.create_study(direction="maximize", pruner=make_pruner(), study_name="lockstep")
        trials = [study.ask() for _ in values]
        kept = []
        for trial, value in zip(trials, values, strict=True):
            trial.report(float(value), step=1)
            if not trial.should_prune():
                kept.append(trial.number)
        found.append(len(kept))
        ours = survivors(dict(enumerate(map(float, values))), 9, maximize=True)
        assert sorted(values[trial] for trial in ours) == list(range(18, 27))
    assert found == left and 9 not in found


def test_trials_have_ended_that_train_no_more() -> None:
    ended = {state for state in TrialState if state.has_ended}
    assert ended == {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED}
