"""Search spaces: order and conditions, grids and corners counted by hand, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import FixedTrial

from crossbow_py.core.errors import UserError
from crossbow_py.search.parameter import Value
from crossbow_py.search.space import Space

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


def test_conditional_parameter_is_asked_for_only_where_it_exists() -> None:
    space = Space.from_mapping(NESTED)
    for fixed, asked in (
        ({"optimizer": "adam", "batch_size": 16}, {"optimizer", "batch_size"}),
        ({"optimizer": "sgd", "momentum": 0, "batch_size": 32}, {"optimizer", "momentum", "batch_size"}),
        ({"optimizer": "sgd", "momentum": 0.9, "batch_size": 32, "nesterov": True}, set(NESTED)),
    ):
        trial = FixedTrial(fixed)
        assert space.suggest(trial) == fixed
        assert set(trial.params) == asked


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


def test_grid_of_a_nested_space_has_conditional_parameters_only_where_they_exist() -> None:
    grid = Space.from_mapping(NESTED).grid()
    # adam: 2 batch sizes. sgd: momentum 0 with 2; momentum 0.5 and 0.9 with 2 batch sizes and 2 of nesterov each.
    expected = [{"optimizer": "adam", "batch_size": size} for size in (16, 32)]
    expected += [{"optimizer": "sgd", "momentum": 0, "batch_size": size} for size in (16, 32)]
    expected += [
        {"optimizer": "sgd", "momentum": momentum, "batch_size": size, "nesterov": nesterov}
        for momentum, size, nesterov in itertools.product((0.5, 0.9), (16, 32), (False, True))
    ]
    assert len(grid) == 12 and sorted(map(json.dumps, grid)) == sorted(map(json.dumps, expected))


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


def test_grid_over_a_range_without_points_is_refused_by_name() -> None:
    space = Space.from_mapping({"a": [1, 2], "optimizer.learning_rate": {"low": 0.1, "high": 1.0}})
    with pytest.raises(UserError, match="optimizer.learning_rate must have num, step or choices for a grid"):
        space.grid()


# --- corners ----------------------------------------------------------------------------------------------------------


def test_corners_set_every_end_and_choice_in_as_many_assignments_as_the_longest_list() -> None:
    space = Space.from_mapping({"lr": {"low": 0.001, "high": 0.5, "log": True}, "size": [16, 32, 64], "n": [1, 2]})
    assert space.corners() == [
        {"lr": 0.001, "size": 16, "n": 1},
        {"lr": 0.5, "size": 32, "n": 2},
        {"lr": 0.001, "size": 64, "n": 1},
    ]


def test_corners_of_a_nested_space_reach_what_exists_only_under_conditions() -> None:
    corners = Space.from_mapping(NESTED).corners()
    grid = Space.from_mapping(NESTED).grid()
    assert all(corner in grid for corner in corners)
    for key, values in (
        ("optimizer", {"sgd", "adam"}),
        ("momentum", {0, 0.5, 0.9}),
        ("batch_size", {16, 32}),
        ("nesterov", {False, True}),
    ):
        assert {corner[key] for corner in corners if key in corner} == values
    assert len(corners) <= 5


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


@given(spaces())
def test_grid_and_corners_of_any_nested_space_agree_with_trying_everything(plain: dict[str, Any]) -> None:
    expected = brute_force(plain)
    reachable = {(key, value) for point in map(json.loads, expected) for key, value in point.items()}
    every = {(key, value) for key, entry in plain.items() for value in entry["choices"]}
    if {key for key, _ in reachable} != set(plain):
        with pytest.raises(UserError, match="never exists, as its conditions want different values of p"):
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
            "space: c never exists, as its conditions want different values of a at once; change one of them.",
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
