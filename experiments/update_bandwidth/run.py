"""GB/s of the update of a bank of learners, beside those of a copy.

    python experiments/update_bandwidth/run.py [--model vgg16 --num-learners 4 --device cpu] [--json PATH]

README.md says what is counted and how.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch

from crossbow_py.core.host import LoadSnapshot, foreign_share
from crossbow_py.engine.device.host import keep_freed_memory
from crossbow_py.engine.modules.precision import choose_device, choose_precision
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.windows import MAX_FOREIGN_SHARE, clean_window, wait_until
from experiments.bench.workloads import WORKLOAD_MODELS
from experiments.tables.markdown import columns_table, number_of, spread_text
from experiments.update_bandwidth.copies import copies, copy_bytes
from experiments.update_bandwidth.updates import Part, device_parts, host_parts, make_bank, num_values

Result = Mapping[str, Any]
_NAMES = {"whole": "gate and update", "gate": "of this, the gate", "update": "of this, the update"}
UPDATE, COPY = "update", "copy"
WHOLE = "whole"
_WINDOW_S = 0.15


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--device")
    add = parser.add_argument
    add("--model", choices=WORKLOAD_MODELS, default="vgg16", help="whose parameters (default %(default)s)")
    add("--num-learners", type=count, default=4, help="K (default %(default)s)")
    add("--seconds", type=positive, default=30.0, help="of measuring (default %(default)s)")

    def measure(given: argparse.Namespace) -> dict[str, Any]:
        return measure_update(given.model, given.num_learners, choose_device(given.device).type, given.seconds)

    return measure_and_write(parser, argv, measure, result_text)


@dataclass
class Side:
    """Parts that run one after the other, and GB/s by part of every repetition, None where no window was clean."""

    kind: str
    name: str
    parts: tuple[Part, ...]
    windows: list[dict[str, float] | None] = field(default_factory=list)
    calls: int = 1
    dropped: int = 0

    def kept(self, part: str) -> list[float]:
        return [window[part] for window in self.windows if window is not None]


class HostClock:
    """Seconds on the host, where others may be at work."""

    watches_load = True

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """Seconds on a CUDA device, by events on the current stream; what others do there is not seen."""

    watches_load = False

    def mark(self) -> torch.cuda.Event:
        """An event enqueued now."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between two events. Blocks the host until the second is over."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


def measure_update(model: str, num_learners: int, device: str, seconds: float) -> dict[str, Any]:
    """GB/s of the update of `num_learners` replicas of a model and of copies, in turns for `seconds`, as plain values.

    `update_gb_per_s` is the whole update's, the gate included; `copy_gb_per_s` is the fastest copy's; `ratio` is the
    median of their ratios within repetitions. What has no clean window, since others took too much of the processor all
    the time, is None. A CPU process keeps freed memory from then on, as with executor=fused.

    Raises:
        UserError: there is no update in one pass on this device.
    """
    where = torch.device(device)
    if where.type == "cpu":
        keep_freed_memory()
    precision = choose_precision("auto", where)
    bank = make_bank(model, num_learners, where, precision)
    parts = device_parts(bank) if where.type == "cuda" else host_parts(bank)
    clock = CudaClock() if where.type == "cuda" else HostClock()
    with ExitStack() as stack:
        found = stack.enter_context(copies(where))
        size = 2 * copy_bytes(where)
        sides = [Side(UPDATE, UPDATE, parts)]
        sides += [Side(COPY, name, (Part(COPY, run, size),)) for name, run in found.items()]
        known = _measure(sides, clock, seconds)
    return {
        "model": model,
        "num_learners": num_learners,
        "device": where.type,
        "precision": precision.name,
        "threads": torch.get_num_threads(),
        "num_values": num_values(bank),
        "bytes_a_value": {part.name: part.num_bytes // num_values(bank) for part in parts},
        "method": {
            "seconds": seconds,
            "window_s": _WINDOW_S,
            "copy_bytes": size // 2,
            "max_foreign_share": MAX_FOREIGN_SHARE,
            "foreign_load_known": known,
        },
        **summary(sides),
    }


def _measure(sides: Sequence[Side], clock: Any, seconds: float) -> bool:
    """Repetitions, a window a side, until the time is over. Returns whether others' load is known."""
    known = True
    for side in sides:
        _window(side, clock)  # first calls fault pages in
        side.calls = max(1, round(_WINDOW_S / sum(_window(side, clock).seconds)))
    end_s = time.monotonic() + seconds
    while not sides[0].windows or time.monotonic() < end_s:
        for side in sides:
            known = _repetition(side, clock, end_s) and known
    return known


def _repetition(side: Side, clock: Any, end_s: float) -> bool:
    """Add a clean window, tried again while there is time; None when none was. Whether others' load is known."""
    taken, dropped = clean_window(lambda: _window(side, clock), wait_until(end_s), MAX_FOREIGN_SHARE)
    side.dropped += dropped
    if taken is None:
        side.windows.append(None)
        return True
    by_part = {part.name: part.num_bytes / s / 1e9 for part, s in zip(side.parts, taken.seconds, strict=True)}
    whole = sum(part.num_bytes for part in side.parts) / sum(taken.seconds) / 1e9
    side.windows.append({WHOLE: whole, **by_part})
    return taken.foreign_share is not None


class Spans(NamedTuple):
    """Mean seconds of each part over a side's calls, and the share of the processor that others took."""

    seconds: list[float]
    foreign_share: float | None


def _window(side: Side, clock: Any) -> Spans:
    before, marks = LoadSnapshot.take(), [clock.mark()]
    for _ in range(side.calls):
        for part in side.parts:
            part.run()
            marks.append(clock.mark())
    spans = [clock.seconds(*pair) for pair in pairwise(marks)]
    share = foreign_share(before, LoadSnapshot.take()) if clock.watches_load else None
    number = len(side.parts)
    return Spans([sum(spans[index::number]) / side.calls for index in range(number)], share)


def summary(sides: Sequence[Side]) -> dict[str, Any]:
    """The figures of `measure_update`, and a row for every part of every side."""
    update, measured = sides[0], [side for side in sides if side.kind == COPY and side.kept(WHOLE)]
    best = max(measured, key=lambda side: median(side.kept(WHOLE)), default=None)
    rows = [_row(side, part, best) for side in sides for part in _names(side)]
    whole = _row(update, WHOLE, best)
    return {
        "copy": None if best is None else best.name,
        "copy_gb_per_s": None if best is None else round(median(best.kept(WHOLE)), 2),
        "update_gb_per_s": whole["gb_per_s"],
        "ratio": whole["ratio"],
        "n": whole["n"],
        "rows": rows,
    }


def _names(side: Side) -> list[str]:
    parts = [part.name for part in side.parts]
    return [WHOLE, *parts] if len(parts) > 1 else [WHOLE]


def _row(side: Side, part: str, best: Side | None) -> dict[str, Any]:
    """One part's GB/s, and its ratio to the fastest copy within repetitions in which both have a clean window."""
    kept, pairs = side.kept(part), zip(side.windows, best.windows if best else (), strict=False)
    ratios = [own[part] / copy[WHOLE] for own, copy in pairs if own is not None and copy is not None]
    return {
        "kind": side.kind,
        "name": side.name,
        "part": part,
        "mb": round(_megabytes(side, part), 1),
        "gb_per_s": round(median(kept), 2) if kept else None,
        "ratio": round(median(ratios), 3) if ratios else None,
        "minimum": round(min(ratios), 3) if ratios else None,
        "maximum": round(max(ratios), 3) if ratios else None,
        "n": len(kept),
        "dropped": side.dropped,
        "gb_per_s_windows": [None if window is None else round(window[part], 2) for window in side.windows],
    }


def _megabytes(side: Side, part: str) -> float:
    sizes: Mapping[str, int] = {each.name: each.num_bytes for each in side.parts}
    return (sum(sizes.values()) if part == WHOLE else sizes[part]) / 1e6


def label(row: Mapping[str, Any]) -> str:
    return f"{row['name']} copy" if row["kind"] == "copy" else _NAMES[row["part"]]


def bandwidth_table(result: Result) -> str:
    def ratio(row: Mapping[str, Any]) -> str:
        return "1" if row["name"] == result["copy"] else spread_text(row["ratio"] and {**row, "median": row["ratio"]})

    return columns_table(result["rows"], {
        "": label, "MB": number_of("mb"), "GB/s": number_of("gb_per_s", ".1f"),
        f"÷ {result['copy'] or 'fastest'} copy": ratio, "n": "n", "dropped": "dropped",
    })  # fmt: skip


def headline(result: Result) -> str:
    counted = ", ".join(f"{name} {count}" for name, count in result["bytes_a_value"].items())
    return (
        f"{result['model']}, K = {result['num_learners']}, {result['precision']} on {result['device']}, "
        f"{result['threads']} threads, {result['num_values']:,} trained values; bytes a value: {counted}."
    )


def result_text(result: Result) -> str:
    return f"{headline(result)}\n\n{bandwidth_table(result)}"


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
