"""Two searchers against one: spans and ratios worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from experiments.ranks import run, search
from experiments.ranks.search import APART, ONE, TWO

BEGUN = datetime(2026, 11, 26)


def result(two: float) -> dict[str, object]:
    rates = {ONE: [2.0, 2.0, 4.0], TWO: [2 * two, 2 * two, 4 * two], APART: [3.0, 3.0, 6.0]}
    return {"kind": "search", "repetitions": 3, **search.ratios_of(rates)}


def test_search_lasts_from_the_first_claim_to_the_last_result() -> None:
    seconds = [(3.0, 10.0), (1.0, 4.0), (5.0, 9.5)]
    times = [(BEGUN + timedelta(seconds=own), BEGUN + timedelta(seconds=end)) for own, end in seconds]
    assert search.span_s(times) == 9.0


def test_ratio_is_taken_within_repetitions() -> None:
    found = search.ratios_of({ONE: [2.0, 2.0, 4.0], TWO: [3.0, 4.0, 7.0], APART: [2.0, 3.0, 4.0]})
    assert found["two_over_one"] == {"median": 1.75, "minimum": 1.5, "maximum": 2.0}
    assert found["apart_over_one"] == {"median": 1.0, "minimum": 1.0, "maximum": 1.5}
    assert found["trials_per_s"][ONE]["median"] == 2.0


def test_searches_apart_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {0: (2.0, 9.0, 0.75), 1: (3.0, 8.0, 0.5)}

    def run_search(overrides: Sequence[str], cores: Sequence[int]) -> dict[str, Any]:
        rate, seconds, best = taken[cores[0]]
        return {"trials": 10, "trials_per_s": rate, "searched_s": seconds, "apart_s": 1.0, "best_value": best}

    monkeypatch.setattr(search, "run_search", run_search)
    found = search.run_apart([], [0, 1])
    assert (found["trials"], found["trials_per_s"], found["searched_s"], found["best_value"]) == (20, 5.0, 9.0, 0.75)


@pytest.mark.parametrize(("two", "verdict"), [(1.8, "reached"), (1.79, "missed")])
def test_headline_says_whether_the_goal_is_reached(two: float, verdict: str) -> None:
    said = search.headline(result(two))
    assert f"(n=3); at least 1.8 was wanted: {verdict}. " in said
    assert said.endswith("know nothing of each other end 1.50 (1.50–1.50) times as many on these cores.")
    answer = run.TABLES_OVER_ALL["searchers"]
    assert answer({"search_digits": result(two), "resnet32_b32": {}}) == search.headline(result(two))
    assert answer({"resnet32_b32": {}}) == ""
