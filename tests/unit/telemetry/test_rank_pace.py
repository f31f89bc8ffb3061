"""The pace of ranks from their counts: numbers worked by hand."""

from __future__ import annotations

import pytest

from crossbow_py.telemetry.rank_pace import RankCounts, RankMeter, RankPace, rank_table, spread_of, spread_text


def pace(rank: int, step_ms: float, tokens: float | None = None, data: float | None = None) -> RankPace:
    return RankPace(rank, f"host-{rank}", step_ms, 1000 / step_ms, tokens, data, rank_wait_share=0.25 * rank)


def test_round_of_a_rank_is_its_time_without_waits_for_other_ranks() -> None:
    meter = RankMeter(["a", "b"], tokens_per_sample=10, waits_for_data=True)
    assert meter.recent == meter.whole == meter.lap() == ()
    meter.update([RankCounts(1.0, 0.0, 0.5), RankCounts(1.5, 0.25, 0.25)], rounds=2, samples=64)
    assert meter.recent == meter.whole == ()
    meter.update([RankCounts(3.0, 0.5, 1.5), RankCounts(3.5, 0.25, 0.25)], rounds=6, samples=192)
    # In 2 s and 4 rounds the first waited 1 s for the second. Each had half of 128 samples.
    assert meter.recent == (
        RankPace(0, "a", step_ms=250.0, images_per_s=64.0, tokens_per_s=640.0, data_wait_share=0.25,
                 rank_wait_share=0.5),
        RankPace(1, "b", step_ms=500.0, images_per_s=32.0, tokens_per_s=320.0, data_wait_share=0.0,
                 rank_wait_share=0.0),
    )  # fmt: skip
    assert meter.whole == meter.lap() == meter.recent
    assert meter.lap() == ()


def test_recent_forgets_what_left_the_window_and_whole_does_not() -> None:
    meter = RankMeter(["a"], None, waits_for_data=False, window_s=2.0)
    for second, rounds in enumerate((0, 1, 2, 4, 6)):
        meter.update([RankCounts(float(second), 0.0, 0.0)], rounds, samples=rounds)
    assert [each.step_ms for each in meter.recent] == [500.0]
    assert [each.step_ms for each in meter.whole] == [pytest.approx(4000 / 6)]
    assert meter.recent[0].data_wait_share is None


def test_interval_without_a_round_or_without_time_has_no_pace() -> None:
    meter = RankMeter(["a", "b"], None, waits_for_data=False)
    counts = [RankCounts(1.0, 0.0, 0.0), RankCounts(1.0, 0.0, 0.0)]
    meter.update(counts, 1, 8)
    meter.update([RankCounts(2.0, 0.0, 0.0), *counts[1:]], 2, 16)  # the clock of the second stood still
    assert meter.recent == ()
    meter.update([RankCounts(3.0, 0.0, 0.0), RankCounts(3.0, 0.0, 0.0)], 2, 16)
    assert len(meter.recent) == 2


def test_spread_names_the_slowest_and_compares_it_with_the_median() -> None:
    spread = spread_of([pace(0, 100.0, data=0.0), pace(1, 150.0, data=0.5), pace(2, 120.0, data=0.25)])
    assert spread is not None
    assert (spread.slowest_rank, spread.slowest_host) == (1, "host-1")
    assert (spread.slowest_step_ms, spread.median_step_ms, spread.fastest_step_ms) == (150.0, 120.0, 100.0)
    assert spread.spread == pytest.approx(0.25)
    assert (spread.most_data_wait_share, spread.median_rank_wait_share) == (0.5, 0.25)
    assert spread_text(spread) == "slowest rank 1 on host-1 (+25%)"


def test_table_of_ranks_begins_with_the_slowest_and_shows_as_many_as_asked_for() -> None:
    lines = rank_table([pace(0, 100.0), pace(1, 125.0), pace(2, 80.0)], most=2).splitlines()
    assert lines == [
        "| rank | host | ms a round | images/s | waiting for ranks |",
        "| ---: | --- | ---: | ---: | ---: |",
        "| 1 | host-1 | 125 | 8 | 25.0% |",
        "| 0 | host-0 | 100 | 10 | 0.0% |",
    ]
    tokens = rank_table([pace(0, 100.0, tokens=5120.0, data=0.125)]).splitlines()
    assert tokens[0] == "| rank | host | ms a round | tokens/s | waiting for ranks | waiting for data |"
    assert tokens[2] == "| 0 | host-0 | 100 | 5,120 | 0.0% | 12.5% |"


def test_single_rank_has_no_spread_and_ranks_with_data_on_the_device_no_waits() -> None:
    assert spread_of([pace(0, 100.0)]) is None
    spread = spread_of([pace(0, 100.0), pace(1, 100.0)])
    assert spread is not None
    assert spread.most_data_wait_share is None
    assert spread.spread == 0.0
