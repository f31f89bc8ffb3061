"""Two searchers against one: spans and ratios worked out by hand."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from experiments.ranks import run, search

BEGUN = datetime(2026, 11, 26)


def result(two: float) -> dict[str, object]:
    rates = {1: [2.0, 2.0, 4.0], 2: [2 * two, 2 * two, 4 * two]}
    return {"kind": "search", "repetitions": 3, **search.ratios_of(rates)}


def test_search_lasts_from_the_first_claim_to_the_last_result() -> None:
    seconds = [(3.0, 10.0), (1.0, 4.0), (5.0, 9.5)]
    times = [(BEGUN + timedelta(seconds=own), BEGUN + timedelta(seconds=end)) for own, end in seconds]
    assert search.span_s(times) == 9.0


def test_ratio_is_taken_within_repetitions() -> None:
    found = search.ratios_of({1: [2.0, 2.0, 4.0], 2: [3.0, 4.0, 7.0]})
    assert found["two_over_one"] == {"median": 1.75, "minimum": 1.5, "maximum": 2.0}
    assert found["trials_per_s"]["1"]["median"] == 2.0


@pytest.mark.parametrize(("two", "verdict"), [(1.8, "reached"), (1.79, "missed")])
def test_headline_says_whether_the_goal_is_reached(two: float, verdict: str) -> None:
    assert search.headline(result(two)).endswith(f"(n=3); at least 1.8 was wanted: {verdict}.")
    answer = run.TABLES_OVER_ALL["searchers"]
    assert answer({"search_digits": result(two), "resnet32_b32": {}}) == search.headline(result(two))
    assert answer({"resnet32_b32": {}}) == ""
