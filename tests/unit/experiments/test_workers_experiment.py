"""Workers and batch sizes: the rule on made-up windows, table and picture, a short measurement for real."""

from __future__ import annotations

from typing import Any

import pytest

from crossbow_py.core.host import Host
from experiments.bench.windows import Window, Windows
from experiments.workers import plot, run
from experiments.workers.run import Cell, Pace

HOST = Host(cores=4, memory_bytes=2**33, shared_bytes=None)


def windows_of(*rates: float | None, share: float = 0.0, round_s: float = 0.1) -> Windows:
    return Windows([None if rate is None else Window(rate, share, round_s, 5) for rate in rates])


def light() -> Cell:
    """Rounds of 10 samples, 0.1 s without workers: 75 ms of them loading, so that three workers are needed."""
    return Cell("light", 10, {
        0: windows_of(100.0, 100.0, share=0.75), 1: windows_of(130.0, 130.0), 2: windows_of(250.0, 200.0),
        3: windows_of(200.0, 380.0),
    })  # fmt: skip


def heavy() -> Cell:
    """As long, 20 ms of them loading; the second worker only seems to help."""
    return Cell("heavy", 10, {0: windows_of(100.0, share=0.2), 1: windows_of(125.0), 2: windows_of(126.0)})


def summaries(*cells: Cell, host: Host = HOST) -> list[dict[str, Any]]:
    return [run.summary(cell, 3 * 64 * 64, host) for cell in cells]


def result() -> dict[str, Any]:
    cells = [light(), heavy()]
    cells[1].windows[3] = Windows([None], dropped=3)
    return {"folder": "photos", "images": 9, "size": 64, "num_workers": [0, 1, 2, 3], "cells": summaries(*cells)}


def test_times_of_a_sample_are_those_without_workers() -> None:
    assert (light().fetch_s(), light().step_s()) == pytest.approx((0.0075, 0.0025))


def test_rule_is_compared_with_the_best_number_within_repetitions() -> None:
    starved, fed = summaries(light(), heavy())
    assert (starved["needed"], starved["recommended"], starved["best"]) == (3, 3, 3)
    assert starved["at_recommended"] == {"median": 1.0, "minimum": 1.0, "maximum": 1.0}
    assert (fed["needed"], fed["recommended"], fed["best"]) == (1, 1, 2)
    assert fed["at_recommended"]["median"] == round(125 / 126, 4)


def test_rule_recommends_no_more_workers_than_cores() -> None:
    (starved,) = summaries(light(), host=Host(2, 2**33, None))
    assert (starved["needed"], starved["recommended"]) == (3, 2)
    assert starved["at_recommended"] == {"median": 0.8882, "minimum": 0.5263, "maximum": 1.25}
    assert not run.is_near(starved)


def test_recommended_number_that_was_not_measured_is_not_judged() -> None:
    cell = light()
    del cell.windows[3]
    assert summaries(cell)[0]["at_recommended"] is None


def test_cell_without_clean_windows_has_no_figures() -> None:
    (empty,) = summaries(Cell("light", 10, {0: windows_of(None), 1: windows_of(None)}))
    keys = ("fetch_ms", "step_ms", "needed", "recommended", "best", "at_recommended")
    assert [empty[key] for key in keys] == [None] * 6
    made = result() | {"cells": [empty], "num_workers": [0, 1]}
    assert "in 0 of 0 cases" in run.result_text(made)


def test_warm_up_makes_all_that_is_made_ahead_and_windows_hold_several_batches_of_each_worker() -> None:
    pace = Pace(seconds=1.0, fetch_s=0.01)
    assert pace.warm_up_s(batch_size=10, num_workers=3) == pytest.approx(0.3 + (2 * 3 + 2) * 0.1)
    assert pace.window_s(batch_size=10, num_workers=1) == 1.0
    assert pace.window_s(batch_size=10, num_workers=3) == pytest.approx(1.8)


def test_picture_has_a_line_a_batch_size_and_a_ring_at_the_recommended_number() -> None:
    starved, fed = plot.draw({"photos": result()}).axes
    lines = [line for line in starved.lines if line.get_label() == "B = 10"]
    assert [list(line.get_ydata()) for line in lines] == [[100.0, 130.0, 225.0, 290.0]]
    rings = [
        [list(line.get_xydata()[0]) for line in axes.lines if line.get_markersize() == 13 and len(line.get_xdata())]
        for axes in (starved, fed)
    ]
    assert rings == [[[3, 290]], [[1, 125]]]
