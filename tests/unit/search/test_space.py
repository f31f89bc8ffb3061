"""Search spaces: order and conditions, grids and corners counted by hand, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from crossbow_py.core.errors import UserError
from crossbow_py.search.space import Space, Value, parse_parameter

# Momentum only with sgd, Nesterov's only with some momentum; conditions are written before what they name.
NESTED: Mapping[str, Any] = {
    "nesterov": {"choices": [False, True], "when": {"momentum": [0.5, 0.9]}},
    "optimizer": ["sgd", "adam"],
    "momentum": {"choices": [0, 0.5, 0.9], "when": {"optimizer": "sgd"}},
    "batch_size": {"low": 16, "high": 32, "step": 16},
}


def keys(space: Space) -> list[str]:
    return [parameter.key for parameter in space.parameters]


def test_space_puts_parameters_after_those_their_conditions_name_and_keeps_the_rest_in_order() -> None:
    assert keys(Space.from_mapping(NESTED)) == ["optimizer", "momentum", "batch_size", "nesterov"]
    assert keys(Space.from_mapping({key: [1, 2] for key in "dacb"})) == list("dacb")


def test_optuna_study_draws_from_a_nested_space_what_its_conditions_allow() -> None:
    space = Space.from_mapping(NESTED)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.suggest(study.ask()) for _ in range(60)]
    grid = space.grid()
    assert all(values in grid for values in drawn)
    assert len({json.dumps(values) for values in drawn}) == len(grid)


# --- grid -------------------------------------------------------------------------------------------------------------


def test_grid_has_every_combination_once_and_the_last_parameter_changes_fastest() -> None:
    space = Space.from_mapping({"a": [1, 2], "b": {"low": 0.1, "high": 0.3, "num": 3}})
    assert space.grid() == [{"a": a, "b": b} for a in (1, 2) for b in (0.1, 0.2, 0.3)]


def test_grid_leaves_out_what_waits_for_a_value_that_is_no_point_of_it() -> None:
    space = Space.from_mapping(
        {"layers": {"low": 1, "high": 9, "num": 2}, "width": {"low": 1, "high": 2**50, "when": {"layers": 5}}}
    )
    assert space.grid() == [{"layers": 1}, {"layers": 9}]


def test_grid_of_ten_thousand_points_is_the_largest() -> None:
    assert len(Space.from_mapping({"a": {"low": 1, "high": 100}, "b": {"low": 1, "high": 100}}).grid()) == 10_000
    message = "space must have at most 10000 combinations for a grid, got 10100 or more with b; take fewer"
    with pytest.raises(UserError, match=message):
        Space.from_mapping({"a": {"low": 1, "high": 100}, "b": {"low": 0, "high": 100}, "c": [1, 2]}).grid()
    with pytest.raises(UserError, match="at most 10000 combinations for a grid, got 1125899906842624 or more with a"):
        Space.from_mapping({"a": {"low": 1, "high": 2**50}}).grid()


# --- corners ----------------------------------------------------------------------------------------------------------


def test_corners_set_every_end_and_choice_in_as_many_assignments_as_the_longest_list() -> None:
    space = Space.from_mapping({"lr": {"low": 0.001, "high": 0.5, "log": True}, "size": [16, 32, 64], "n": [1, 2]})
    assert space.corners() == [
        {"lr": 0.001, "size": 16, "n": 1},
        {"lr": 0.5, "size": 32, "n": 2},
        {"lr": 0.001, "size": 64, "n": 1},
    ]


def test_corners_reach_what_waits_for_a_number_inside_a_range() -> None:
    space = Space.from_mapping(
        {"layers": {"low": 1, "high": 9}, "skip": {"choices": ["a", "b"], "when": {"layers": 4}}}
    )
    assert space.corners() == [{"layers": 1}, {"layers": 9}, {"layers": 4, "skip": "a"}, {"layers": 4, "skip": "b"}]


@st.composite
def spaces(draw: st.DrawFn) -> dict[str, Any]:
    """Up to six parameters; each may wait for some values of one or two before it. Some never exist."""
    plain: dict[str, Any] = {}
    for index in range(draw(st.integers(1, 6))):
        choices = list(range(draw(st.integers(1, 3))))
        entry: dict[str, Any] = {"choices": choices}
        if plain and draw(st.booleans()):
            waits_for = draw(st.lists(st.sampled_from(sorted(plain)), min_size=1, max_size=2, unique=True))
            entry["when"] = {
                key: draw(st.lists(st.sampled_from(plain[key]["choices"]), min_size=1, unique=True))
                for key in waits_for
            }
        plain[f"p{index}"] = entry
    return dict(draw(st.permutations(list(plain.items()))))


def brute_force(plain: Mapping[str, Any]) -> set[str]:
    """The grid by trying all values for all keys, each absent as well."""

    def exists(key: str, values: Mapping[str, Value]) -> bool:
        return all(values[other] in allowed for other, allowed in plain[key].get("when", {}).items())

    found = set()
    for chosen in itertools.product(*([None, *entry["choices"]] for entry in plain.values())):
        values = dict(zip(plain, chosen, strict=True))
        if all((value is not None) == exists(key, values) for key, value in values.items()):
            found.add(json.dumps({key: value for key, value in values.items() if value is not None}, sort_keys=True))
    return found


@pytest.mark.slow
@given(spaces())
def test_grid_and_corners_of_any_nested_space_agree_with_trying_everything(plain: dict[str, Any]) -> None:
    expected = brute_force(plain)
    reachable = {(key, value) for point in map(json.loads, expected) for key, value in point.items()}
    every = {(key, value) for key, entry in plain.items() for value in entry["choices"]}
    if {key for key, _ in reachable} != set(plain):
        with pytest.raises(UserError, match="never exists: its conditions want several values of p"):
            Space.from_mapping(plain)
        return
    space = Space.from_mapping(plain)
    grid = [json.dumps(point, sort_keys=True) for point in space.grid()]
    assert len(grid) == len(set(grid)) and set(grid) == expected
    corners = space.corners()
    assert {json.dumps(corner, sort_keys=True) for corner in corners} <= expected
    assert {pair for corner in corners for pair in corner.items()} == reachable == every


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({}, "got {}; for example optimizer.learning_rate: {low: 0.001, high: 0.1, log: true}."),
        (None, "space must be a mapping with at least one key to search, got None; for example "),
        (["lr"], r"space must be a mapping with at least one key to search, got \['lr'\]."),
        ({1: [1, 2]}, "space must have dotted configuration keys, got 1; write one such as optimizer.learning_rate."),
        ({"": [1, 2]}, "space must have dotted configuration keys, got ''."),
        (
            {"optimizer": [1, 2], "b": {"choices": [1], "when": {"optimiser": 1}}},
            r"b.when names 'optimiser', which is not searched; did you mean 'optimizer'\?",
        ),
        (
            {"a": ["x", "y"], "b": {"choices": [1], "when": {"a": ["x", "z"]}}},
            "b.when wants a to be 'z', and it is one of 'x', 'y'; name one of its choices or whole numbers.",
        ),
        (
            {"a": {"low": 1, "high": 7, "step": 2}, "b": {"choices": [1], "when": {"a": 2}}},
            "b.when wants a to be 2, and it is a whole number from 1 to 7 in steps of 2; name",
        ),
        (
            {"a": {"low": 0.0, "high": 1.0}, "b": {"choices": [1], "when": {"a": 0.5}}},
            "b.when wants a to be 0.5, and it is a number from 0.0 to 1.0; name",
        ),
        ({"a": {"choices": [1], "when": {"a": 1}}}, "space: conditions go in a circle, a when a; take one"),
        (
            {
                "x": {"choices": [1], "when": {"a": 1}},
                "a": {"choices": [1], "when": {"b": 1}},
                "b": {"choices": [1], "when": {"c": 1}},
                "c": {"choices": [1], "when": {"a": 1}},
            },
            "space: conditions go in a circle, a when b when c when a; take one of them away.",
        ),
        (
            {
                "a": [1, 2],
                "b": {"choices": [1], "when": {"a": 1}},
                "c": {"choices": [1], "when": {"b": 1, "a": 2}},
            },
            "space: c never exists: its conditions want several values of a; drop one.",
        ),
    ],
)
def test_impossible_space_is_refused_in_one_sentence(plain: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Space.from_mapping(plain)


def test_space_as_plain_values_survives_json_and_tells_other_spaces_apart() -> None:
    plain = Space.from_mapping(NESTED).to_plain()
    assert json.loads(json.dumps(plain)) == plain
    assert [entry["key"] for entry in plain] == ["optimizer", "momentum", "batch_size", "nesterov"]
    for change in (
        {"optimizer": ["adam", "sgd"]},
        {"batch_size": {"low": 16.0, "high": 32.0, "step": 16.0}},
        {"nesterov": {"choices": [False, True], "when": {"momentum": 0.5}}},
        {"extra": [1, 2]},
    ):
        assert Space.from_mapping({**NESTED, **change}).to_plain() != plain
    moved = {key: NESTED[key] for key in ("batch_size", "nesterov", "optimizer", "momentum")}
    assert Space.from_mapping(moved).to_plain() != plain


def shown(values: Sequence[Any]) -> list[str]:
    """With their types, as 1 == 1.0 == True."""
    return [repr(value) for value in values]


# --- what a sampler is asked for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "distribution"),
    [
        ({"low": 0.1, "high": 0.5}, FloatDistribution(0.1, 0.5)),
        ({"low": 0, "high": 0.5}, FloatDistribution(0.0, 0.5)),
        ({"low": 1e-3, "high": 1.0, "log": True}, FloatDistribution(1e-3, 1.0, log=True)),
        ({"low": 0, "high": 1, "step": 0.25}, FloatDistribution(0.0, 1.0, step=0.25)),
        ({"low": 1, "high": 64}, IntDistribution(1, 64)),
        ({"low": 1, "high": 64, "log": True, "num": 7}, IntDistribution(1, 64, log=True)),
        ({"low": 16, "high": 64, "step": 16}, IntDistribution(16, 64, step=16)),
        ({"low": -3, "high": 0}, IntDistribution(-3, 0)),
        ({"choices": ["a", None, True, 2, 0.5]}, CategoricalDistribution(["a", None, True, 2, 0.5])),
        (["sgd", "adam"], CategoricalDistribution(["sgd", "adam"])),
    ],
)
def test_parameter_asks_optuna_for_its_kind_of_value_under_its_key(plain: Any, distribution: Any) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(5):
        trial = study.ask()
        value = parse_parameter("x", plain).suggest(trial)
        assert (trial.params, trial.distributions) == ({"x": value}, {"x": distribution})


# --- points of a grid -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "points"),
    [
        ({"low": 0.1, "high": 0.5, "num": 5}, (0.1, 0.2, 0.3, 0.4, 0.5)),
        ({"low": 0.001, "high": 1.0, "log": True, "num": 4}, (0.001, 0.01, 0.1, 1.0)),
        ({"low": 0.1, "high": 0.7, "step": 0.2}, (0.1, 0.3, 0.5, 0.7)),
        ({"low": 0.25, "high": 0.75, "num": 2}, (0.25, 0.75)),
        ({"low": 3, "high": 6}, (3, 4, 5, 6)),
        ({"low": 16, "high": 64, "step": 16}, (16, 32, 48, 64)),
        ({"low": 1, "high": 100, "log": True, "num": 3}, (1, 10, 100)),
        ({"low": 1, "high": 10, "num": 4}, (1, 4, 7, 10)),
        ({"low": 1, "high": 3, "num": 7}, (1, 2, 3)),  # no whole number twice
        ({"choices": ["b", None, True, 1.5]}, ("b", None, True, 1.5)),
    ],
)
def test_points_are_spread_as_the_range_says_with_both_ends_exact(plain: Any, points: tuple[Value, ...]) -> None:
    assert shown(parse_parameter("x", plain).points()) == shown(points)


@pytest.mark.parametrize("plain", [{"low": 0.1, "high": 0.5}, {"low": 1, "high": 8, "log": True}])
def test_grid_over_a_range_that_says_no_distance_is_refused_by_name(plain: Any) -> None:
    with pytest.raises(UserError, match="space: x must have num, step or choices for a grid, got none of them; set"):
        Space.from_mapping({"a": [1, 2], "x": plain}).grid()


# --- what conditions may name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "possible", "impossible"),
    [
        (["sgd", 1, None], ["sgd", 1, None], ["adam", True, False, "1", "None"]),
        ([True, False], [True, False], [1, 0, "true"]),
        ({"low": 2, "high": 8, "step": 3}, [2, 5, 8], [1, 3, 11, 2.5, "2", None, True]),
        ({"low": 0, "high": 3}, [0, 1, 3], [-1, 4, False]),
        ({"low": 0.0, "high": 3.0}, [], [0.0, 1, 3.0, math.nan]),
    ],
)
def test_parameter_can_be_its_choices_and_whole_numbers_only(
    plain: Any, possible: list[Value], impossible: list[Value]
) -> None:
    parameter = parse_parameter("x", plain)
    assert [value for value in possible if not parameter.can_be(value)] == []
    assert [value for value in impossible if parameter.can_be(value)] == []


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (0.1, r"space: a.b must be {low, high}, {choices} or a list of choices, got 0.1; write a list"),
        ("fast", r"a.b must be {low, high}, {choices} or a list of choices, got 'fast'."),
        ({}, "a.b must have low and high, or choices, got low None and high None; set both ends."),
        ({"low": 1.0}, "a.b must have low and high, or choices, got low 1.0 and high None; set both ends."),
        ({"lo": 1, "high": 2}, r"a.b has no field 'lo'; did you mean 'low'\?"),
        ({"key": "c", "low": 1, "high": 2}, "a.b has no field 'key'; known: choices, high, log, low, num, step, when"),
        ({"low": "1e-3", "high": 1}, "space: a.b.low must be a number or null, got '1e-3'."),
        ({"low": True, "high": 2}, "a.b.low must be a number or null, got True."),
        ({"low": 0.0, "high": math.inf}, "a.b.high must be a finite number, got inf."),
        ({"low": math.nan, "high": 1.0}, "a.b.low must be a finite number, got nan."),
        ({"low": 0.0, "high": 1e39}, "a.b.high must be a number that 32 bits can hold"),
        ({"low": 0, "high": 2**53 + 1}, "a.b must have whole numbers of at most 53 bits, got a larger one; take"),
        ({"choices": [10**5000]}, "a.b must have whole numbers of at most 53 bits, got a larger one."),
        ({"low": 2.0, "high": 1.0}, "a.b has an empty range: low must be less than high, got low 2.0 and high 1.0; "),
        ({"low": 3, "high": 3}, "a.b has an empty range: low must be less than high, got low 3 and high 3; raise high"),
        ({"low": 0, "high": 1.0, "log": True}, "a.b must have low greater than 0 where log is true, got 0.0; raise"),
        ({"low": 1, "high": 2, "log": "yes"}, "a.b.log must be true or false, got 'yes'."),
        ({"low": 0.0, "high": 1.0, "step": 0}, "a.b.step must be greater than 0, got 0.0."),
        ({"low": 0.0, "high": 1.0, "step": -0.1}, "a.b.step must be greater than 0, got -0.1."),
        ({"low": 0.1, "high": 1.0, "step": 0.4}, "a whole number of steps, got steps of 0.4 .*; set high=0.9."),
        ({"low": 0, "high": 10, "step": 4}, "a whole number of steps, got steps of 4 from 0 to 10; set high=8."),
        ({"low": 0, "high": 1, "step": 4}, "a whole number of steps, got steps of 4 from 0 to 1; set high=4."),
        ({"low": 0.0, "high": 1e30, "step": 0.1}, "a.b must have at most 9007199254740992 steps, .*; raise step"),
        ({"low": 1, "high": 9, "step": 2, "log": True}, "a.b must have step or log, got both; leave one out."),
        ({"low": 1, "high": 9, "step": 2, "num": 3}, "a.b must have step or num, got both; leave one out."),
        ({"low": 1, "high": 9, "num": 1}, "a.b.num must be at least 2, got 1."),
        ({"low": 1, "high": 9, "num": 10_001}, "a.b.num must be at most 10000, got 10001."),
        ({"low": 1, "high": 9, "num": 2.5}, "a.b.num must be a whole number or null, got 2.5."),
        ([], "a.b must have choices, got an empty list; name the values to try."),
        (
            {"choices": "sgd"},
            "a.b.choices must be a list of numbers, text, true, false or null, or lists of them, got 'sgd'; write",
        ),
        (
            [[[80]], [100]],
            "a.b.choices must be a list of numbers, text, true, false or null, or lists of them, got ",
        ),
        ([{"a": 1}], "a.b.choices must be a list of numbers, text, true, false or null, or lists of them, got "),
        ([0.1, math.nan], "a.b.choices must be a finite number, got nan."),
        (["x", "y", "x"], "a.b must have choices that differ, got 'x' and 'x'; leave one out."),
        ([1, True], "a.b must have choices that differ, got 1 and True; leave one out."),
        (
            {"choices": [1, 2], "low": 1, "step": 1},
            "a.b must have choices or a range, got choices and low, step; leave",
        ),
        ({"choices": [1, 2], "low": 0}, "a.b must have choices or a range, got choices and low; leave one out."),
        ({"choices": [1], "when": "sgd"}, "a.b.when must be a mapping .* to values, got 'sgd'; write"),
        ({"choices": [1], "when": {}}, "a.b.when must be a mapping from another key to values, got {}"),
        ({"choices": [1], "when": {"c": []}}, r"a.b.when must have a key with numbers, text, .* got {'c': \[\]}."),
        ({"choices": [1], "when": {3: 1}}, "a.b.when must have a key with numbers, .* got {3: 1}; write when: {KEY"),
        ({"choices": [1], "when": {"c": [[1]]}}, r"a.b.when must have a key .* got {'c': \[\[1\]\]}."),
    ],
)
def test_impossible_parameter_is_refused_in_one_sentence(plain: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_parameter("a.b", plain)
    assert str(caught.value).startswith("space: a.b")
    assert "\n" not in str(caught.value)


def test_parameters_as_plain_values_name_what_was_set_and_tell_whole_ranges_from_others() -> None:
    assert parse_parameter("x", {"low": 0, "high": 2}).to_plain() == {"key": "x", "low": 0, "high": 2, "integer": True}
    assert parse_parameter("x", {"low": 0.0, "high": 2.0}).to_plain() == {"key": "x", "low": 0.0, "high": 2.0}
    full = {"low": 0.5, "high": 2.0, "log": True, "num": 3, "when": {"y": "z"}}
    assert parse_parameter("x", full).to_plain() == {"key": "x", **full, "when": {"y": ["z"]}}
    assert parse_parameter("x", [False, None]).to_plain() == {"key": "x", "choices": [False, None]}


def test_choices_that_are_lists_are_texts_for_samplers_and_lists_for_configurations() -> None:
    parameter = parse_parameter("model.hidden", [[64], [128, 128], "[1]"])
    assert parameter.choices == ("[64]", "[128, 128]", "[1]")
    assert parameter.meant("[128, 128]") == [128, 128]
    assert parameter.meant("[1]") == "[1]"  # a text that was written as one
    assert parameter.position("[128, 128]") == 0.5


def test_place_lies_between_the_ends_of_a_range_or_among_choices() -> None:
    assert parse_parameter("a", {"low": 2.0, "high": 4.0}).position(2.5) == 0.25
    assert parse_parameter("a", {"low": 0.01, "high": 100.0, "log": True}).position(1.0) == pytest.approx(0.5)
    assert [parse_parameter("a", [False, 0.5, None]).position(value) for value in (False, 0.5, None)] == [0.0, 0.5, 1.0]
    assert parse_parameter("a", ["only"]).position("only") == 0.0


def test_whole_numbers_are_raised_to_one_of_a_few_less_than_a_factor_of_root_two_apart() -> None:
    space = Space.from_mapping({
        "model.units": {"low": 16, "high": 64, "step": 4}, "model.layers": [1, 2, 3], "model.rate": [0.1, 1],
        "batch_size": {"low": 8, "high": 16},
    })  # fmt: skip
    units, layers, rate, _ = space.parameters
    assert {value: units.wider(value) for value in (64, 48, 44, 36, 32, 28, 24, 20, 16)} == {
        64: 64, 48: 64, 44: 44, 36: 44, 32: 44, 28: 28, 24: 28, 20: 28, 16: 16,
    }  # fmt: skip
    assert [layers.wider(value) for value in (1, 2, 3)] == [1, 2, 3]
    assert rate.wider(1) == 1
    params = {"model.units": 36, "model.layers": 3, "model.rate": 0.1, "batch_size": 9}
    assert space.wider(params, "model.") == [{**params, "model.units": 44}]
    assert space.wider({**params, "model.units": 64}, "model.") == []
    ranks = Space.from_mapping({"model.lora.rank": [2, 8, 64]})  # of adapters, which are small beside their base
    assert [ranks.wider({"model.lora.rank": rank}, "model.") for rank in (2, 64)] == [[{"model.lora.rank": 64}], []]
