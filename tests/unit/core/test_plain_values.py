"""In what runs differ."""

from __future__ import annotations

from crossbow_py.core.plain_values import differing, told_apart


def test_keys_that_are_alike_or_of_the_folder_are_left_out() -> None:
    one = {"seed": 1, "batch_size": 16, "output_dir": "a", "averaging": "sma", "averaging.correction_rate": None}
    two = {"seed": 2, "batch_size": 16, "output_dir": "b", "averaging": "papa", "averaging.pull": 0.01}
    assert differing([one, two]) == {
        "seed": ["1", "2"], "averaging": ["sma", "papa"], "averaging.correction_rate": ["null", "–"],
        "averaging.pull": ["–", "0.01"],
    }  # fmt: skip


def test_one_run_differs_from_nobody() -> None:
    assert differing([{"seed": 1}]) == {}


def test_configurations_are_told_apart_without_what_follows_from_a_choice() -> None:
    sma = {"averaging": "sma", "averaging.rate": 1.0, "output_dir": "a"}
    assert told_apart([sma, {"averaging": "papa", "output_dir": "b"}]) == ["averaging=sma", "averaging=papa"]
    others = [{**sma, "averaging.rate": 2.0}, {"averaging": "papa"}]
    assert told_apart([sma, *others])[:2] == ["averaging=sma, averaging.rate=1.0", "averaging=sma, averaging.rate=2.0"]
