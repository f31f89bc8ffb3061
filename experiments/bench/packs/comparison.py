"""Panels of sides that take turns, a window each; and rows with medians and ratios, paired by repetition."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from crossbow_py.core.errors import CrossbowError
from experiments.bench.gate import Gate, Ready, Visit, Window
from experiments.bench.packs.inference import predict
from experiments.bench.packs.layers import run_layers
from experiments.bench.packs.side import BASES, CAPTURED, DEFAULT, SERIAL, TUNED, PackSide, PackWorkload
from experiments.bench.packs.training import train_captured, train_pack
from experiments.bench.program import count, measuring_parser, positive
from experiments.bench.sides.side import Side
from experiments.bench.sides.tuned import default_loop, tuned_single
from experiments.bench.windows import MAX_FOREIGN_SHARE, Windows, by_turns
from experiments.bench.workers import SideError, SideProcess
from experiments.bench.workloads import Effort, Workload

EFFORT = Effort(trial_s=0.2, trials=2)
WARM_UP_S = 0.3


@dataclass(frozen=True)
class Method:
    """The method: how long windows are, how many a side has, and the foreign load from which on they are dropped."""

    seconds: float
    repetitions: int
    max_foreign_share: float = MAX_FOREIGN_SHARE


@dataclass
class PackCell:
    """A side on a workload, and its windows."""

    side: PackSide
    workload: PackWorkload
    windows: Windows[Window] = field(default_factory=Windows)
    ready: Ready | None = None
    failure: str = ""

    def add(self, take: Callable[[], Window], method: Method) -> None:
        self.windows.add(take, max_foreign_share=method.max_foreign_share)


def measure_panel(cells: Sequence[PackCell], method: Method) -> None:
    """Start every cell's process, let them take turns in a new random order each time, and end them.

    A cell that cannot be had says so in `failure`, and the others go on.
    """
    with ExitStack() as stack:
        processes: dict[int, SideProcess] = {}
        for number, cell in enumerate(cells):
            try:
                process = stack.enter_context(SideProcess(run_pack_side, cell.side, cell.workload, EFFORT))
                cell.ready = process.ready
                warm = process.window(Visit(WARM_UP_S))
            except SideError as error:
                cell.failure = str(error)
                print(f"left out: {error}", flush=True)
                continue
            processes[number] = process
            print(f"{name_of(cell)}: about {warm.images_per_s:,.0f} images/s", flush=True)
        for number in by_turns(list(processes), method.repetitions):
            cells[number].add(partial(processes[number].window, Visit(method.seconds)), method)


def name_of(cell: PackCell) -> str:
    return f"{cell.workload.model} b={cell.workload.batch_size} {cell.side.label}"


def rows_of(cells: Sequence[PackCell]) -> list[dict[str, Any]]:
    """A row a cell, with its ratios to the one-at-a-time sides of the same panel."""
    return [_row(cell, cells) for cell in cells]


def _row(cell: PackCell, cells: Sequence[PackCell]) -> dict[str, Any]:
    side = cell.side
    return {
        "model": cell.workload.model,
        "batch_size": cell.workload.batch_size,
        "side": side.side,
        "num_models": side.num_learners,
        "precision": side.precision,
        "work": side.work,
        **cell.windows.figures(),
        "threads": cell.ready.threads if cell.ready else None,
        "detail": cell.ready.detail if cell.ready else "",
        "failure": cell.failure,
        "over": {base: ratio_to(base, cell, cells) for base in BASES},
    }


def ratio_to(side: str, cell: PackCell, cells: Sequence[PackCell]) -> dict[str, float] | None:
    """Median, smallest and largest of the ratios to a side of the same model, where both have a clean window."""
    same = (other for other in cells if (other.side.side, other.workload.model) == (side, cell.workload.model))
    base = next(same, None)
    return None if base is None or base is cell else cell.windows.ratio(base.windows)


def run_pack_side(side: Side, workload: Workload, gate: Gate, effort: Effort) -> None:
    """Work until the gate raises FinishedError. Raises CrossbowError when a side cannot be had."""
    own, of_pack = cast(PackSide, side), cast(PackWorkload, workload)
    try:
        if own.work == "layers":
            run_layers(own, of_pack, gate, effort)
        elif own.work == "inference":
            predict(own, of_pack, gate, effort)
        else:
            _train(own, of_pack, gate, effort)
    except RuntimeError as error:  # of a capture, or memory
        words = str(error).splitlines() or ["no more was said"]
        raise CrossbowError(f"{type(error).__name__}: {words[0]}") from error


def _train(side: PackSide, workload: PackWorkload, gate: Gate, effort: Effort) -> None:
    if side.side == DEFAULT:
        default_loop(workload, gate)
    elif side.side == TUNED:
        tuned_single(side.precision, workload, gate, effort)
    elif side.side == CAPTURED:
        train_captured(side, workload, gate)
    else:
        train_pack(side, workload, gate)


def pack_parser(description: str | None, *, repetitions: int, seconds: float) -> argparse.ArgumentParser:
    """Make a parser with the options that say how, where and how long is measured."""
    parser = measuring_parser(description, "--device", "--max-foreign-share")
    add = parser.add_argument
    add("--repetitions", type=count, default=repetitions, help="windows a side (default %(default)s)")
    add("--seconds", type=positive, default=seconds, help="length of a window (default %(default)s)")
    add("--quick", action="store_true", help="a small part of it, in seconds: to see that it runs")
    return parser


def one_at_a_time(device: str) -> tuple[str, ...]:
    return (DEFAULT, TUNED, CAPTURED) if device == "cuda" else (DEFAULT, TUNED, SERIAL)


def executors_on(device: str) -> tuple[str, ...]:
    return ("streams", "fused") if device == "cuda" else ("threads", "fused", "fused_threads")


def predictors_on(device: str) -> tuple[str, ...]:
    """The executors of ensembles that a device has, but `serial`."""
    return ("fused",) if device == "cuda" else ("threads", "fused", "fused_threads")


def measure_panels(panels: Sequence[Sequence[PackCell]], options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Measure one panel after another: the method and the rows."""
    method = Method(options.seconds, options.repetitions, options.max_foreign_share)
    for panel in panels:
        measure_panel(panel, method)
    cells = [cell for panel in panels for cell in panel]
    return {
        "device": device,
        "data": sorted({cell.workload.data for cell in cells}),
        "method": {
            "seconds": method.seconds,
            "repetitions": method.repetitions,
            "max_foreign_share": method.max_foreign_share,
            "foreign_load_known": all(cell.windows.load_known for cell in cells),
        },
        "rows": [row for panel in panels for row in rows_of(panel)],
    }
