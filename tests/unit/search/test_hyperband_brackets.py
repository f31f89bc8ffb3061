"""The brackets of Hyperband and successive halving: tables worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossbow_py.core.errors import UserError
from crossbow_py.search.hyperband import Bracket, Segment, bracket_of, make_brackets, to_epochs

# 9 at 1, 3, 9 epochs; 5 at 3, 9; 3 at 9.
SMALL = make_brackets("hyperband", num_trials=None, min_epochs=1, max_epochs=9, eta=3)


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


def test_hyperband_of_27_epochs_has_49_trials_in_four_brackets() -> None:
    # s_max = 3. ceil(4·27/4), ceil(4·9/3), ceil(4·3/2), ceil(4·1/1)
    brackets = hyperband(27, 3)
    assert table(brackets) == [
        [(27, 1), (9, 3), (3, 9), (1, 27)],
        [(12, 3), (4, 9), (1, 27)],
        [(6, 9), (2, 27)],
        [(4, 27)],
    ]
    assert [(bracket.index, bracket.first_trial, bracket.num_trials) for bracket in brackets] == [
        (0, 0, 27),
        (1, 27, 12),
        (2, 39, 6),
        (3, 45, 4),
    ]


def test_hyperband_of_9_epochs_has_17_trials_in_three_brackets() -> None:
    # s_max = 2. ceil(3·9/3), ceil(3·3/2 = 4.5), ceil(3·1/1)
    assert table(SMALL) == [[(9, 1), (3, 3), (1, 9)], [(5, 3), (1, 9)], [(3, 9)]]


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


@pytest.mark.parametrize(("max_epochs", "eta"), [(10, 3), (3, 5), (1, 7), (0.7, 3)])
def test_rungs_at_the_same_depth_of_different_brackets_are_at_equal_epochs(max_epochs: float, eta: int) -> None:
    # Not exact in binary, and yet the same; nor does the last rung miss the last epoch.
    brackets = hyperband(max_epochs, eta, min_epochs=max_epochs / eta**4)
    assert brackets[0].epochs == tuple(max_epochs / divisor for divisor in (eta**4, eta**3, eta**2, eta, 1))
    for depth in range(1, 5):
        assert brackets[depth].epochs == brackets[0].epochs[depth:]


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
        ({"method": "hyperbnd"}, r"method has no 'hyperbnd'; did you mean 'hyperband'\?"),
        ({"method": "none"}, "num_trials must be set where method is none, got null; say how many trials"),
        ({"num_trials": 0}, "num_trials must be from 1 to 100000, got 0; take one at least"),
        ({"num_trials": 100_001}, "num_trials must be from 1 to 100000, got 100001; take fewer"),
        ({"min_epochs": 0.0}, r"min_epochs must be greater than 0 and at most max_epochs \(9\), got 0.0"),
        ({"min_epochs": 10}, r"min_epochs must be .* at most max_epochs \(9\), got 10; .* such as min_epochs=3\."),
        ({"min_epochs": math.nan}, "min_epochs must be greater than 0 and at most .* got nan"),
        ({"min_epochs": 1e-300, "max_epochs": 1e300}, "at least a millionth of max_epochs .*; raise it"),
        ({"max_epochs": math.inf}, "max_epochs must be a finite number greater than 0, got inf; say how long"),
        ({"eta": 1}, "eta must be at least 2, got 1; the usual is eta=3"),
        ({"max_epochs": 3**11}, "has 279292 trials, and the most is 100000; set num_trials, or a higher min_epochs"),
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
