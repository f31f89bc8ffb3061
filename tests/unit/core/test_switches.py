"""Switches in the environment: what they say, and that a mistake in one is the user's to know at once."""

from __future__ import annotations

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.core.switches import Switches, read_switches
from crossbow_py.train.__main__ import main


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Switches()),
        ({"CROSSBOW_KERNELS": "", "CROSSBOW_GRAPHS": ""}, Switches()),
        ({"CROSSBOW_KERNELS": "none"}, Switches(frozenset())),
        ({"CROSSBOW_KERNELS": "update, loss"}, Switches(frozenset({"update", "loss"}))),
        ({"CROSSBOW_KERNELS": "layers,convolutions", "CROSSBOW_GRAPHS": "1"},
         Switches(frozenset({"layers", "convolutions"}), True)),
        ({"CROSSBOW_GRAPHS": "0"}, Switches(None, False)),
    ],
)  # fmt: skip
def test_switches_are_read_and_written_alike(variables: dict[str, str], expected: Switches) -> None:
    assert read_switches(variables) == expected
    assert read_switches(expected.environment()) == expected


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CROSSBOW_KERNELS": "loss,fast"}, r"CROSSBOW_KERNELS must be none, or some of update,.*, got 'loss,fast'"),
        ({"CROSSBOW_KERNELS": "none,loss"}, "CROSSBOW_KERNELS must be none, or"),
        ({"CROSSBOW_KERNELS": "convolutions"}, "add layers"),
        ({"CROSSBOW_GRAPHS": "yes"}, "CROSSBOW_GRAPHS must be 0 or 1, got 'yes'"),
    ],
)
def test_switch_that_means_nothing_is_refused_with_the_remedy(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_switches(variables)


def test_command_with_a_bad_switch_ends_at_once_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CROSSBOW_GRAPHS", "no")
    assert main(["+experiment=digits"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: CROSSBOW_GRAPHS must be 0 or 1") and error.count("\n") == 1


def test_numbered_device_is_refused_with_the_variable_that_chooses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["+experiment=digits", "device=cuda:7"]) == 2
    error = capsys.readouterr().err
    assert "CUDA_VISIBLE_DEVICES=7" in error and error.count("\n") == 1
