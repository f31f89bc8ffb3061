"""Sides and results that several tests of the experiments start from."""

from __future__ import annotations

from typing import Any

from experiments.common.machine import machine
from experiments.throughput.comparison import Measurement, ratios, to_row
from experiments.throughput.gate import Ready
from experiments.throughput.sides import Side

DEFAULT, TUNED = Side("default_loop", 1, "none", "fp32"), Side("tuned_single", 1, "none", "fp32")
WITH, WITHOUT = Side("threads", 2, "sma", "fp32"), Side("threads", 2, "none", "fp32")


def measurement(side: Side, *windows: float | None) -> Measurement:
    return Measurement(side, Ready(1, ""), list(windows))


def throughput_result() -> dict[str, Any]:
    measurements = [measurement(DEFAULT, 10.0), measurement(TUNED, 20.0), measurement(WITH, 38.0),
                    measurement(WITHOUT, 39.0), measurement(Side("serial", 1, "sma", "fp32"), None)]  # fmt: skip
    measurements[1].ready = Ready(2, "fp32 fused")
    return {
        "machine": machine(), "model": "lenet", "batch_size": 16, "data": "mnist", "device": "cpu",
        "method": {"seconds": 2.5, "repetitions": 1, "max_foreign_share": 0.15, "foreign_load_known": True},
        "rows": [to_row(entry, "lenet", 16) for entry in measurements], "ratios": ratios(measurements),
    }  # fmt: skip
