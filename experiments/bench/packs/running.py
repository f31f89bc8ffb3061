"""The command line that comparisons of packs share, and how one is run: panels one after another, into one result."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules.precision import choose_device
from experiments.bench.arguments import count, measuring_parser, positive
from experiments.bench.machine import machine
from experiments.bench.packs.comparison import Method, PackCell, measure_panel, mixed_rows, rows_of
from experiments.bench.packs.side import CAPTURED, DEFAULT, SERIAL, TUNED
from experiments.bench.windows import MAX_FOREIGN_SHARE


def pack_parser(description: str | None, *, repetitions: int, seconds: float) -> argparse.ArgumentParser:
    """Make a parser with the options that say how, where and how long is measured."""
    parser = measuring_parser(description)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default %(default)s")
    add("--repetitions", type=count, default=repetitions, help="windows a side (default %(default)s)")
    add("--seconds", type=positive, default=seconds, help="length of a window (default %(default)s)")
    add("--max-foreign-share", type=positive, default=MAX_FOREIGN_SHARE,
        help="drop windows in which others take a larger share of the cores (default %(default)s)")  # fmt: skip
    add("--quick", action="store_true", help="a small part of it, in seconds: to see that it runs")
    return parser


def device_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """cpu or cuda; ends the program with exit code 2 where there is no such device."""
    try:
        return str(choose_device(options.device).type)
    except UserError as error:
        parser.error(str(error))


def one_at_a_time(device: str) -> tuple[str, ...]:
    return (DEFAULT, TUNED, CAPTURED) if device == "cuda" else (DEFAULT, TUNED, SERIAL)


def executors_on(device: str) -> tuple[str, ...]:
    return ("streams", "fused") if device == "cuda" else ("threads", "fused", "fused_threads")


def predictors_on(device: str) -> tuple[str, ...]:
    """The executors of ensembles that a device has, but `serial`."""
    return ("fused",) if device == "cuda" else ("threads", "fused", "fused_threads")


def measure_panels(panels: Sequence[Sequence[PackCell]], options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Measure one panel after another: facts of the machine, the method, rows and mixed rows."""
    facts, method = machine(), Method(options.seconds, options.repetitions, options.max_foreign_share)
    for panel in panels:
        measure_panel(panel, method)
    cells = [cell for panel in panels for cell in panel]
    return {
        "machine": facts,
        "device": device,
        "data": sorted({cell.workload.data for cell in cells}),
        "method": {
            "seconds": method.seconds,
            "repetitions": method.repetitions,
            "max_foreign_share": method.max_foreign_share,
            "foreign_load_known": all(cell.load_known for cell in cells),
        },
        "rows": [row for panel in panels for row in rows_of(panel)],
        "mixed": [row for panel in panels for row in mixed_rows(panel)],
    }
