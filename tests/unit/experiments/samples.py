"""Sides and results that several tests of the experiments start from."""

from __future__ import annotations

from typing import Any

from experiments.bench.gate import Choice, FinishedError, Ready, Window
from experiments.bench.machine import machine
from experiments.bench.sides.side import SINGLE_SIDES, Side
from experiments.bench.windows import Windows
from experiments.throughput import suite_report
from experiments.throughput.comparison import Measurement, ratios, to_row
from experiments.throughput.planning import Cell, LeftOut

BATCH = 8
DEFAULT, TUNED = Side("default_loop", 1, "none", "fp32"), Side("tuned_single", 1, "none", "fp32")
WITH, WITHOUT = Side("threads", 2, "sma", "fp32"), Side("threads", 2, "none", "fp32")


def measurement(side: Side, *windows: float | None) -> Measurement:
    """With windows of ten seconds at these images/s."""
    taken = [None if rate is None else Window(round(10 * rate), 10.0, 0.0) for rate in windows]
    return Measurement(side, Ready(1, ""), Windows(taken))


def throughput_result() -> dict[str, Any]:
    measurements = [measurement(DEFAULT, 10.0), measurement(TUNED, 20.0), measurement(WITH, 38.0),
                    measurement(WITHOUT, 39.0), measurement(Side("serial", 1, "sma", "fp32"), None)]  # fmt: skip
    measurements[1].ready = Ready(2, "fp32 fused")
    return {
        "machine": machine(), "model": "lenet", "batch_size": 16, "data": "mnist", "device": "cpu",
        "method": {"seconds": 2.5, "repetitions": 1, "max_foreign_share": 0.15, "foreign_load_known": True},
        "rows": [to_row(entry, "lenet", 16) for entry in measurements], "ratios": ratios(measurements),
    }  # fmt: skip


def suite_measurements() -> dict[Cell, Measurement]:
    """Three passes at b=16 and a little at b=32; auto chose fused with K=4, and a cell has no clean window."""
    rates: dict[tuple[int, str, int], tuple[float | None, ...]] = {
        (16, "default_loop", 1): (1000.0, 1000.0, 1000.0),
        (16, "tuned_single", 1): (2000.0, 1600.0, 2000.0),
        (16, "threads", 1): (1500.0, 1500.0, 1500.0),
        (16, "threads", 2): (3000.0, 3200.0, 3100.0),
        (16, "fused", 1): (None, None, None),
        (16, "fused", 4): (4000.0, 4000.0, 5000.0),
        (16, "auto", 4): (3800.0, 4000.0, None),
        (32, "default_loop", 1): (2000.0, 2000.0, 2000.0),
        (32, "threads", 2): (5000.0, 5000.0, 5000.0),
    }
    found = {}
    for (batch_size, name, learners), windows in rates.items():
        side = Side(name, learners, "none" if name in SINGLE_SIDES else "sma", "fp32")
        found[Cell(batch_size, side)] = measurement(side, *windows)
        if name == "auto":
            found[Cell(batch_size, side)].ready = Ready(2, "", Choice("fused", 4, True, 5.5, 7.0))
    return found


def suite_result() -> dict[str, Any]:
    found = suite_measurements()
    out = {Cell(32, Side("fused", k, "sma", "fp32")): LeftOut("time", "late") for k in (1, 4)}
    failed = {Cell(32, Side("serial", 1, "sma", "fp32")): LeftOut("failure", "memory does not hold 1 learners")}
    return {
        "kind": suite_report.KIND, "machine": machine(), "device": "cpu", "precision": "fp32", "data": {"mlp": "mnist"},
        "method": {"minutes": 5.0, "took_s": 280.0, "passes": 3, "window_s": 0.15, "max_foreign_share": 0.15,
                   "foreign_load_known": True},
        "rows": suite_report.rows_of("mlp", found), "ratios": suite_report.ratios_of("mlp", found),
        "auto": suite_report.auto_of("mlp", found), "left_out": suite_report.left_out_of("mlp", out | failed),
    }  # fmt: skip


class CountingGate:
    """Ends the loop after a number of images."""

    num_learners: int | None = None

    def __init__(self, limit: int) -> None:
        self.limit, self.images, self.prepared = limit, 0, Ready(0)

    def ready(self, ready: Ready) -> None:
        self.prepared = ready

    def tick(self, images: int) -> None:
        self.images += images
        if self.images >= self.limit:
            raise FinishedError


def cells(table: str, line: int) -> list[str]:
    """Those of one line of a table; line 0 is the header, and line 1 the rule under it."""
    return [cell.strip() for cell in table.splitlines()[line].strip("|").split("|")]
