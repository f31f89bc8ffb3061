"""Who survives and who trains on, whatever the order of results."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossbow_py.core.errors import UserError
from crossbow_py.search.hyperband import (
    Bracket,
    Outcome,
    Segment,
    TrialStanding,
    TrialState,
    beaten,
    best,
    bracket_of,
    is_over,
    is_reached,
    make_brackets,
    planned_epochs,
    ready,
    standing,
    survivors,
    to_epochs,
    total_samples,
)

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


def test_complete_rung_promotes_its_third_before_trials_of_later_brackets_begin() -> None:
    results: dict[Segment, Outcome] = {Segment(trial, 0): trial / 10 for trial in range(9)}
    results[Segment(10, 0)] = 0.5
    waiting = ready(SMALL, results, maximize=True)
    assert waiting == segments((6, 1), (7, 1), (8, 1), (9, 0), (11, 0), (12, 0), (13, 0), (14, 0), (15, 0), (16, 0))
    assert ready(SMALL, results, maximize=False)[:3] == segments((0, 1), (1, 1), (2, 1))


def test_failed_trials_leave_fewer_survivors_and_never_hold_the_others_up() -> None:
    outcomes: list[Outcome] = [None, 0.5, math.nan, None, None, None, 0.4, None, None]
    results = {Segment(trial, 0): outcome for trial, outcome in enumerate(outcomes)}
    assert ready(SMALL, results, maximize=True)[:3] == segments((1, 1), (6, 1), (9, 0))
    results[Segment(1, 1)] = None
    assert ready(SMALL, results, maximize=True)[:2] == segments((6, 1), (9, 0))
    results[Segment(6, 1)] = 0.3
    assert ready(SMALL, results, maximize=True)[:2] == segments((6, 2), (9, 0))


def test_search_run_to_its_end_runs_what_the_table_says() -> None:
    results = finish(SMALL, accuracy)
    per_rung = [
        [sum(segment.rung == rung and segment.trial in bracket.trials for segment in results) for rung in range(3)]
        for bracket in SMALL
    ]
    assert per_rung == [[9, 3, 1], [5, 1, 0], [3, 0, 0]]
    assert is_over(SMALL, results, maximize=True)


@pytest.mark.slow
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


def hyperband(max_epochs: float, eta: int, min_epochs: float = 1, num_trials: int | None = None) -> tuple[Bracket, ...]:
    return make_brackets("hyperband", num_trials=num_trials, min_epochs=min_epochs, max_epochs=max_epochs, eta=eta)


def table(brackets: Sequence[Bracket]) -> list[list[tuple[int, float]]]:
    """As the paper prints it: (n_i, r_i) of each rung, per bracket."""
    return [list(zip(bracket.sizes, bracket.epochs, strict=True)) for bracket in brackets]


def test_hyperband_of_81_epochs_has_the_brackets_of_the_paper() -> None:
    # s_max = 4. ceil(5·81/5), ceil(5·27/4 = 33.75), ceil(5·9/3), ceil(5·3/2 = 7.5), ceil(5·1/1)
    assert table(hyperband(81, 3)) == [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]


def test_hyperband_of_a_range_that_is_no_power_ends_at_the_last_epoch() -> None:
    # 10 / 1 = 10: s_max = 2 as 9 <= 10 < 27; the first rung is at 10/9, not at 1.
    assert table(hyperband(10, 3)) == [[(9, 10 / 9), (3, 10 / 3), (1, 10)], [(5, 10 / 3), (1, 10)], [(3, 10)]]
    # 100 / 4 = 25, eta 4: s_max = 2; ceil(3·16/3), ceil(3·4/2), ceil(3·1/1)
    assert table(hyperband(100, 4, min_epochs=4)) == [
        [(16, 6.25), (4, 25), (1, 100)],
        [(6, 25), (1, 100)],
        [(3, 100)],
    ]
    # eta 2, 7 / 1: s_max = 2; ceil(3·4/3), ceil(3·2/2), 3
    assert table(hyperband(7, 2)) == [[(4, 1.75), (2, 3.5), (1, 7)], [(3, 3.5), (1, 7)], [(3, 7)]]


@pytest.mark.parametrize(
    ("min_epochs", "max_epochs", "eta", "rungs"),
    [
        (0.05, 0.15, 3, 2),  # 0.15 / 0.05 is 2.9999999999999996
        (0.05, 4.05, 3, 5),  # 80.99999999999999
        (0.1, 2.7, 3, 4),
        (1 / 3, 81, 3, 6),
        (1, 3**12, 3, 13),  # math.log(3**12, 3) is 12.000000000000002, that of 3**5 4.999999999999999
        (1, 3**5, 3, 6),
        (1, 124.99, 5, 3),
        (1, 125, 5, 4),
        (5, 5, 3, 1),
    ],
)
def test_first_bracket_has_a_rung_for_every_power_within_the_range(
    min_epochs: float, max_epochs: float, eta: int, rungs: int
) -> None:
    epochs = hyperband(max_epochs, eta, min_epochs, num_trials=10)[0].epochs
    assert len(epochs) == rungs and epochs[-1] == max_epochs
    assert min_epochs * (1 - 1e-9) <= epochs[0] < min_epochs * eta


def test_hyperband_with_more_trials_repeats_its_pass_and_cuts_the_last_bracket() -> None:
    brackets = hyperband(9, 3, num_trials=17 + 9 + 2)
    assert table(brackets[:3]) == table(SMALL) and table(brackets[3:4]) == table(SMALL[:1])
    assert table(brackets[4:]) == [[(2, 3), (1, 9)]]
    assert [bracket.first_trial for bracket in brackets] == [0, 9, 14, 17, 26]
    assert [bracket.index for bracket in brackets] == [0, 1, 2, 3, 4]


def test_bracket_with_fewer_trials_than_rungs_still_trains_one_to_the_end() -> None:
    assert table(hyperband(27, 3, num_trials=2)) == [[(2, 1), (1, 3), (1, 9), (1, 27)]]


def test_successive_halving_has_brackets_of_the_deepest_kind_only() -> None:
    one = [(9, 1), (3, 3), (1, 9)]

    def halving(num_trials: int | None) -> tuple[Bracket, ...]:
        return make_brackets("successive_halving", num_trials=num_trials, min_epochs=1, max_epochs=9, eta=3)

    assert table(halving(None)) == [one]
    assert table(halving(22)) == [one, one, [(4, 1), (1, 3), (1, 9)]]
    assert table(halving(7)) == [[(7, 1), (2, 3), (1, 9)]]


def test_method_none_trains_every_trial_to_the_end_and_reads_no_lower_limit() -> None:
    assert table(make_brackets("none", num_trials=5, min_epochs=99, max_epochs=2, eta=3)) == [[(5, 2)]]


@given(
    st.floats(0.01, 10), st.floats(1, 500), st.integers(2, 5), st.one_of(st.none(), st.integers(1, 300)),
    st.sampled_from(["hyperband", "successive_halving"]),
)  # fmt: skip
def test_brackets_of_any_search_number_their_trials_without_gaps(
    min_epochs: float, ratio: float, eta: int, num_trials: int | None, method: str
) -> None:
    brackets = make_brackets(
        method, num_trials=num_trials, min_epochs=min_epochs, max_epochs=min_epochs * ratio, eta=eta
    )
    total = sum(bracket.num_trials for bracket in brackets)
    assert [trial for bracket in brackets for trial in bracket.trials] == list(range(total))
    assert num_trials in (None, total)
    for bracket in brackets:
        assert bracket.sizes[0] == bracket.num_trials and min(bracket.sizes) >= 1
        assert all(b >= eta * a * 0.999999 for a, b in zip(bracket.epochs, bracket.epochs[1:], strict=False))
        # Each rung keeps floor(n_i / eta), as algorithm 1 says.
        pairs = zip(bracket.sizes, bracket.sizes[1:], strict=False)
        assert all(after == max(1, before // eta) for before, after in pairs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "none"}, "num_trials must be set where method is none, got null; set it"),
        ({"num_trials": 100_001}, "num_trials must be from 1 to 100000, got 100001; take fewer"),
        ({"min_epochs": 0.0}, r"min_epochs must be above 0 and at most max_epochs \(9\), got 0.0"),
        ({"min_epochs": 10}, r"min_epochs must be .* at most max_epochs \(9\), got 10; take a part"),
        ({"min_epochs": math.nan}, "min_epochs must be above 0 and at most .* got nan"),
        ({"min_epochs": 1e-300, "max_epochs": 1e300}, "at least a millionth of max_epochs .*; raise it"),
        ({"max_epochs": 3**11}, "has 279292 trials, and the most is 100000; set num_trials"),
    ],
)
def test_impossible_search_is_refused_in_one_sentence(changes: dict[str, object], message: str) -> None:
    good = {"method": "hyperband", "num_trials": None, "min_epochs": 1, "max_epochs": 9, "eta": 3}
    with pytest.raises(UserError, match=message):
        make_brackets(**{**good, **changes})


def test_segments_end_at_the_epochs_of_their_rung_in_their_bracket() -> None:
    segments = [Segment(*each) for each in ((8, 0), (8, 1), (8, 2), (9, 0), (13, 1), (14, 0), (16, 0))]
    assert [to_epochs(SMALL, segment) for segment in segments] == [1, 3, 9, 3, 9, 9, 9]
    assert [bracket_of(SMALL, trial).index for trial in (0, 8, 9, 13, 14, 16)] == [0, 0, 1, 1, 2, 2]
    for nobody in (-1, 17):
        with pytest.raises(AssertionError, match=f"no bracket has trial {nobody}"):
            bracket_of(SMALL, nobody)


def test_samples_of_a_search_are_those_of_every_rung_from_the_one_before() -> None:
    brackets = make_brackets("hyperband", num_trials=None, min_epochs=1, max_epochs=9, eta=3)
    # 9 trials for 1 epoch, 3 for 2 more, 1 for 6 more; 5 for 3, 1 for 6 more; 3 for 9.
    assert total_samples(brackets, 40) == 40 * ((9 + 6 + 6) + (15 + 6) + 27)
    assert planned_epochs(brackets) == (9 + 6 + 6) + (15 + 6) + 27
