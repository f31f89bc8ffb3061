"""The shipped search of digits, whole: 27 trials in synchronous rungs, packed as wide as measuring finds it pays."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossbow_py.search import __main__ as search
from tests.caches import use_cache
from tests.searches import assert_rungs_keep_the_best, report, segments, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("in_an_empty_folder")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured of packs is remembered for this test alone."""
    use_cache(tmp_path / "cache", monkeypatch)


def test_shipped_search_keeps_the_top_third_of_every_rung_and_finds_a_good_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert search.main(["+experiment=search_digits", "output_dir=search"]) == 0
    said, found, measured = capsys.readouterr(), report(), values()
    assert found["status"] == "finished" and said.err == ""
    assert "Trials of mlp with batches of 16 run" in said.out
    # The fastest rates of the space may diverge, on some processors: such a trial has failed, and harms no other.
    failed = [trial["trial"] for trial in found["trials"] if trial["state"] == "failed"]
    assert len(measured) == 27 and len(failed) <= 2
    assert {trial for trial, own in measured.items() if "1" not in own} == set(failed)
    assert_rungs_keep_the_best([("1", "3", 9), ("3", "9", 3), ("9", "27", 1)])
    assert len(segments()) == 27 + 9 + 3 + 1
    ended = ["complete", *["failed"] * len(failed), *["pruned"] * (26 - len(failed))]
    assert sorted(trial["state"] for trial in found["trials"]) == ended
    best = found["best"]
    assert best["value"] == measured[best["trial"]]["27"] >= 0.98
    assert 0.95 <= best["test_accuracy"] <= 1  # measured once, on other images
    assert Path(best["model_path"]).exists() and best["command"] in said.out
