"""The share of preprocessing: figures by hand, table and picture of a made-up result, a short measurement."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.bench.windows import Window, Windows
from experiments.preprocessing import run
from experiments.preprocessing.run import LOOP, OWN, WORKER, Side


def windows_of(*pairs: tuple[float, float]) -> Windows:
    return Windows([Window(rate, share, 0.1, 4) for rate, share in pairs])


def result() -> dict[str, Any]:
    sides = [
        Side(OWN, 1, windows_of((400.0, 0.8), (500.0, 0.8), (400.0, 0.7))),
        Side(LOOP, 16, windows_of((2000.0, 0.2), (2000.0, 0.25), (2400.0, 0.3))),
        Side(WORKER, 16, Windows([Window(4000.0, 0.0, 0.1, 4), None, Window(4000.0, 0.02, 0.1, 4)], dropped=3)),
    ]
    return {
        "folder": "photos", "images": 9, "size": 64, "batch_size": 16, "parameters": 1000, "method": {"rounds": 4},
        **run.summary(sides),
    }  # fmt: skip


def test_sides_are_one_model_alone_and_two_ways_for_every_number() -> None:
    assert [(side.name, side.num_models, side.num_workers) for side in run.sides_of([4, 1, 4])] == [
        (OWN, 1, 0),
        (LOOP, 1, 0),
        (WORKER, 1, 1),
        (LOOP, 4, 0),
        (WORKER, 4, 1),
    ]


@pytest.mark.parametrize(
    ("share", "num_models", "verdict"),
    [(0.05, 16, "reached"), (0.051, 16, "missed"), (0.01, 8, "not measured")],
)
def test_headline_judges_sixteen_models_with_a_worker(share: float, num_models: int, verdict: str) -> None:
    made = result()
    made["rows"][2] |= {"wait_share": {"median": share}, "num_models": num_models}
    assert f"to reach: 5% with 16; {verdict}" in run.headline(made)
