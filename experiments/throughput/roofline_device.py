"""The peaks of a device, and the share of the time in which it does nothing.

Peaks are known for the devices of a small table and measured for others. A few rounds are traced for the kernels that
really ran and the time in which none did. Not one trace has been taken on a GPU yet.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from crossbow_py.engine.modules.precision import PrecisionName
from experiments.bench.rounds import Rounds, Setup

Interval = tuple[float, float]

# Of a part of a device's name: bytes/s of a copy, read and written, and FLOP/s of a matrix product, as measured.
_KNOWN = {"H200": {"bytes_per_s": 4.3e12, "bf16": 790e12}}
_MEASURE_S = 0.2
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}  # well beyond any cache
_MATRIX_ROWS = {"cpu": 1024, "cuda": 8192}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Eager rounds and captures, until rounds are replays alone.
_WARM_UP_ROUNDS, _TRACED_ROUNDS = 5, 20


@dataclass(frozen=True)
class Peaks:
    """The peaks of a device at a precision. `known` lists what is from the table instead of measured."""

    bytes_per_s: float
    flops_per_s: float
    known: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """A trace of some rounds: kernels a round, and the share of the time in which none ran."""

    kernels_per_round: float
    idle_share: float


@cache
def peaks(device: torch.device, precision: PrecisionName) -> Peaks:
    """The speed of a copy and of a matrix product, from the table or measured in a fraction of a second each.

    Products are in the precision asked for, with torch's settings as they are.
    """
    known = known_peaks(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    bytes_per_s = known.get("bytes_per_s") or _copy_bytes_per_s(device)
    flops_per_s = known.get(precision) or _product_flops_per_s(device, _DTYPES[precision])
    return Peaks(bytes_per_s, flops_per_s, tuple(name for name in ("bytes_per_s", precision) if name in known))


def known_peaks(name: str) -> Mapping[str, float]:
    """The table's values for a device of that name; nothing for others."""
    return next((found for part, found in _KNOWN.items() if part in name), {})


def _copy_bytes_per_s(device: torch.device) -> float:
    source = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _fastest_s(device, lambda: target.copy_(source))


def _product_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    rows = _MATRIX_ROWS[device.type]
    left, right, out = (torch.ones(rows, rows, device=device, dtype=dtype) for _ in range(3))
    return 2 * rows**3 / _fastest_s(device, lambda: torch.mm(left, right, out=out))


def _fastest_s(device: torch.device, function: Callable[[], object]) -> float:
    """The seconds of the fastest of as many calls as fit in the time for it, after one that does not count."""

    def seconds() -> float:
        begun_s = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun_s

    seconds()
    until_s, best_s = time.perf_counter() + _MEASURE_S, seconds()
    while time.perf_counter() < until_s:
        best_s = min(best_s, seconds())
    return best_s


def traced_rounds(setup: Setup) -> Trace | None:
    """Trace rounds of an executor on CUDA; None where the profiler saw no kernel.

    Of one window: from the begin of its first kernel to the end of its last.
    """
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize()  # kernels of a graph are seen if the tracer was there when it was made
    with Rounds(setup) as rounds, tempfile.TemporaryDirectory() as folder:
        rounds.run(_WARM_UP_ROUNDS)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            rounds.run(_TRACED_ROUNDS)
            torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels = kernel_intervals(json.loads(path.read_text()))
    if not kernels:
        return None
    window = min(begin for begin, _ in kernels), max(end for _, end in kernels)
    return Trace(len(kernels) / _TRACED_ROUNDS, idle_share(kernels, window))


def kernel_intervals(trace: Mapping[str, Any]) -> list[Interval]:
    """Begin and end of every kernel in a Chrome trace, in its microseconds; copies are none."""
    kernels = (event for event in trace["traceEvents"] if event.get("cat") == "kernel" and "dur" in event)
    return [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in kernels]


def idle_share(intervals: Iterable[Interval], window: Interval) -> float:
    """Share of a window in which none of the intervals, which may overlap, was going on."""
    first, last = window
    assert last > first, f"a window must have a length, got {window}"
    busy, covered_until = 0.0, first
    for begin, end in sorted(intervals):
        begin, end = max(begin, covered_until), min(end, last)  # noqa: PLW2901
        if end > begin:
            busy += end - begin
            covered_until = end
    return 1 - busy / (last - first)
