"""Settings: types, limits, conversions that lose nothing, and sentences that name the field."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import ClassVar, Literal

import pytest

from crossbow_py import SGD, SMA
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import allowed, check, flat, from_mapping, setting, suggestion
from crossbow_py.schedules import Cosine


@dataclass(frozen=True)
class Oven:
    GROUP: ClassVar[str] = "oven"

    degrees: float = setting(180.0, "heat", minimum=0, below=300)
    share: float | None = setting(None, "of the top heat", above=0, maximum=1)
    trays: int = setting(1, "how many", minimum=1)
    fan: bool = setting(False, "moving air")
    mode: Literal["bake", "grill"] = setting("bake", "what for")
    steps: tuple[float, ...] = setting((), "degrees in turn", above=0)
    rate: float | tuple[float, ...] = setting(1.0, "one or several", minimum=0)
    label: str = setting("", "on the door")
    extra: dict[str, int] = setting({}, "anything else")

    def __post_init__(self):
        check(self)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("degrees", -1, r"oven.degrees must be at least 0, got -1.0\."),
        ("degrees", 300, r"oven.degrees must be less than 300, got 300.0\."),
        ("degrees", math.nan, r"oven.degrees must be a finite number, got nan\."),
        ("degrees", math.inf, r"oven.degrees must be a finite number, got inf\."),
        ("degrees", 1e39, r"oven.degrees must be a number that 32 bits can hold \(up to 3.4e\+38\), got 1e\+39\."),
        ("degrees", True, r"oven.degrees must be a number, got True\."),
        ("share", 0.0, r"oven.share must be greater than 0, got 0.0\."),
        ("share", 1.5, r"oven.share must be at most 1, got 1.5\."),
        ("share", "half", r"oven.share must be a number or null, got 'half'\."),
        ("trays", 1.0, r"oven.trays must be a whole number, got 1.0\."),
        ("trays", False, r"oven.trays must be a whole number, got False\."),
        ("fan", 1, r"oven.fan must be true or false, got 1\."),
        ("mode", "fry", r"oven.mode must be one of bake, grill, got 'fry'\."),
        ("steps", (1.0, 0.0), r"oven.steps must be greater than 0, got 0.0\."),
        ("steps", 3.0, r"oven.steps must be a list, each a number, got 3.0; write oven.steps=\[3.0\]\."),
        ("rate", ("a",), r"oven.rate must be a number or a list, each a number, got \('a',\)\."),
        ("rate", (1.0, -1.0), r"oven.rate must be at least 0, got -1.0\."),
        ("label", None, r"oven.label must be text, got None\."),
        ("extra", [], r"oven.extra must be a mapping, got "),
    ],
)
def test_value_that_does_not_fit_is_one_sentence_with_field_rule_and_value(field, value, message):
    with pytest.raises(UserError, match=rf"^{message}"):
        Oven(**{field: value})


def test_limits_are_inclusive_or_exclusive_as_declared():
    oven = Oven(degrees=0, share=1, trays=1)
    assert (oven.degrees, oven.share, oven.trays) == (0, 1, 1)


def test_lists_become_tuples_and_whole_numbers_floats_where_those_are_wanted():
    oven = Oven(degrees=200, steps=[100, 150], rate=[1, 2], trays=2)
    assert oven.steps == (100.0, 150.0)
    assert oven.rate == (1.0, 2.0)
    assert [type(value) for value in (oven.degrees, oven.steps[0], oven.rate[0], oven.trays)] == [
        float, float, float, int,
    ]  # fmt: skip


def test_settings_are_frozen_and_a_default_mapping_is_not_shared():
    with pytest.raises(FrozenInstanceError):
        Oven().degrees = 3.0
    Oven().extra["a"] = 1
    assert Oven().extra == {}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("degreese", r"unknown key oven.degreese; did you mean 'oven.degrees'\?"),
        (" trays", r"unknown key oven.' trays'; did you mean 'oven.trays'\?"),
        (7, r"unknown key oven.7; known: degrees, extra, fan"),
        ("zzz", r"unknown key oven.zzz; known: degrees, extra, fan, label, mode, rate, share, steps, trays"),
    ],
)
def test_unknown_key_is_refused_with_a_suggestion(key, message):
    with pytest.raises(UserError, match=message):
        from_mapping(Oven, {key: 1}, "oven")


def test_suggestion_knows_the_initials_of_one_name_and_lists_all_names_where_two_have_them():
    names = ["learning_rate", "weight_decay", "momentum"]
    assert suggestion("lr", names) == "; did you mean 'learning_rate'?"
    assert suggestion("lr", [*names, "loss_ratio"]) == "; known: learning_rate, loss_ratio, momentum, weight_decay."
    assert suggestion("q", ["momentum"]) == "; known: momentum."
    assert suggestion("m", ["momentum"]) == "; known: momentum."


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("degrees", "a number, at least 0, less than 300"),
        ("share", "a number or null, greater than 0, at most 1"),
        ("fan", "true or false"),
        ("mode", "one of bake, grill"),
        ("rate", "a number or a list, each a number, at least 0"),
    ],
)
def test_allowed_says_types_and_limits(name, words):
    assert allowed(Oven, name) == words


def test_flat_values_have_dotted_keys_and_what_is_no_number_or_text_becomes_text() -> None:
    nested = {"model": "mlp", "optimizer": {"learning_rate": 0.1, "milestones": [1, 2]}, "order_seed": None, "a": True}
    assert flat(nested) == {
        "model": "mlp", "optimizer.learning_rate": 0.1, "optimizer.milestones": "[1,2]", "order_seed": "null",
        "a": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=0.1), "SGD has no 'lr'; did you mean 'learning_rate'?"),  # type: ignore[call-arg]
        (lambda: SMA(decay=1), "SMA has no 'decay'; known: "),  # type: ignore[call-arg]
        (lambda: Cosine(warmup=1), "Cosine has no 'warmup'; did you mean 'warmup_epochs'?"),  # type: ignore[call-arg]
    ],
)
def test_unknown_keyword_of_settings_is_refused_with_the_one_that_was_meant(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


def test_settings_can_be_copied_and_pickled() -> None:
    made = SGD(learning_rate=0.2)
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
