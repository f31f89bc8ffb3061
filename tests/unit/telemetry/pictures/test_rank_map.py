"""The map of ranks: its colours, its columns, and when it is shown."""

from __future__ import annotations

from crossbow_py.telemetry.pictures import rank_map
from crossbow_py.telemetry.pictures.rank_map import RankMap

LEFT, TOP = rank_map._LEFT_PX, rank_map._TOP_PX


def test_rank_slower_than_the_median_is_red_and_a_faster_one_blue() -> None:
    ranks = RankMap()
    ranks.add(100, [10.0, 15.0, 10.0, 10.0, 8.75])
    picture = ranks.last()
    assert picture is not None
    high = rank_map._MOST_HIGH_PX
    colours = [tuple(picture[TOP + high * rank + high // 2, LEFT + 5]) for rank in range(5)]
    # 25 % slower or more is the full red; 12.5 % faster is half way from white to blue, (21, 101, 192).
    assert colours == [(255, 255, 255), (198, 40, 40), (255, 255, 255), (255, 255, 255), (138, 178, 224)]


def test_columns_are_ordered_by_time_and_pairs_become_one_when_there_are_too_many(monkeypatch) -> None:
    monkeypatch.setattr(rank_map, "_MOST_COLUMNS", 4)
    ranks = RankMap()
    for samples, slow in enumerate((10.0, 20.0, 30.0, 10.0), start=1):
        ranks.add(samples, [10.0, slow, 10.0])
    assert [column.tolist() for column in ranks._columns] == [[10.0, 15.0, 10.0], [10.0, 20.0, 10.0]]
    ranks.add(5, [10.0, 10.0, 10.0])
    assert len(ranks._columns) == 2  # a column is of two from now on
    ranks.add(6, [10.0, 40.0, 10.0])
    assert ranks._columns[-1].tolist() == [10.0, 25.0, 10.0]


def test_map_is_shown_ever_more_rarely_and_not_before_there_is_one() -> None:
    ranks = RankMap()
    assert ranks.due() is None and ranks.last() is None
    shown = []
    for samples in range(100, 4000, 100):
        ranks.add(samples, [1.0] * 20)
        if ranks.due() is not None:
            shown.append(samples)
    assert shown == [800, 1600, 3200]  # from the eighth column on
