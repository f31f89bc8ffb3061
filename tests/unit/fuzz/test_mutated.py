"""Ten thousand mutated command lines and recorded configurations: what they ask for, or one line; never a traceback.

The counts: pytest -m slow -s tests/unit/fuzz/test_mutated.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fuzz.command_lines import command_line
from tests.unit.fuzz.outcomes import Outcomes, Watched
from tests.unit.fuzz.recorded_files import reading_command, recorded_file


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The current folder holds runs and a search; home is beside it."""
    return Watched(tmp_path, monkeypatch)


def numbers(quick: int, deep: int) -> pytest.MarkDecorator:
    """Which examples: a few always, all where slow tests run."""
    slow = pytest.param(range(deep), marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3000)], id="all")
    return pytest.mark.parametrize("examples", [pytest.param(range(0, deep, deep // quick), id="some"), slow])


@numbers(25, 7_000)
def test_mutated_command_line_runs_or_is_refused_in_one_line(examples: range, watched: Watched) -> None:
    outcomes = Outcomes("command lines")
    for number in examples:
        name, argv = command_line(number)
        watched.call(name, argv, outcomes, f"command line {number}")
    print(f"\n{outcomes}")
    assert not outcomes.failures, "\n\n".join([str(outcomes), *outcomes.failures[:20]])


@numbers(20, 3_000)
def test_mutated_configuration_of_a_run_is_read_or_refused_in_one_line(examples: range, watched: Watched) -> None:
    outcomes = Outcomes("recorded configurations")
    for number in examples:
        folder, name, argv = reading_command(number)
        Path(folder, "config.yaml").write_bytes(recorded_file(number, is_search=folder == "runs/search_digits/s"))
        watched.call(name, argv, outcomes, f"configuration {number}")
    print(f"\n{outcomes}")
    assert not outcomes.failures, "\n\n".join([str(outcomes), *outcomes.failures[:20]])
