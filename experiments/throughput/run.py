"""Images/s of several learners kept together, against PyTorch's default loop and against one tuned model.

    python experiments/throughput/run.py --model resnet32 --batch-size 16 [--json PATH]

Every side runs in its own process and is blocked except for its windows; README.md says what the sides are and how the
numbers are made.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules.precision import BF16, PrecisionName, choose_device, choose_precision
from experiments.bench.gate import Visit
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.sides.side import Side
from experiments.bench.windows import by_turns
from experiments.bench.workers import SideError, SideProcess
from experiments.bench.workloads import WORKLOAD_MODELS, Effort, Workload, prepare
from experiments.throughput.comparison import Measurement, plan_sides, ratios, to_row
from experiments.throughput.report import result_text
from experiments.throughput.sides import ALL_SIDES, sides_on, start_side

_WARM_UP_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--device", "--max-foreign-share")
    add = parser.add_argument
    add("--model", choices=WORKLOAD_MODELS, default="resnet32", help="what is trained (default %(default)s)")
    add("--batch-size", type=count, default=16, help="images in a batch of one learner (default %(default)s)")
    add("--num-learners", type=count, nargs="+", default=[1, 2, 4], help="K of the executors (default 1 2 4)")
    add("--precision", choices=("auto", "fp32", "bf16"), nargs="+", default=["auto", "fp32"], help="default auto fp32")
    add("--sides", choices=ALL_SIDES, nargs="+", help="default: all that run on the device")
    add("--seconds", type=positive, default=2.5, help="length of a window (default %(default)s)")
    add("--repetitions", type=count, default=7, help="windows a side (default %(default)s)")
    try:
        return measure_and_write(parser, argv, measure_sides, result_text)
    except SideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def measure_sides(given: argparse.Namespace) -> dict[str, Any]:
    """Raises SideError."""
    device = choose_device(given.device)
    chosen = dict.fromkeys(choose_precision(name, device) for name in given.precision)
    precisions: list[PrecisionName] = ["bf16" if precision == BF16 else "fp32" for precision in chosen]
    sides = _sides(given, device.type, precisions)
    with tempfile.TemporaryDirectory() as folder:
        return compare(sides, prepare(given.model, given.batch_size, device.type, Path(folder)), given)


def compare(sides: Sequence[Side], workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Start every side, measure all of them in turns, and sum up. Raises SideError."""
    known = True
    with ExitStack() as stack:
        processes: dict[Side, SideProcess] = {}
        for side in sides:
            # One after another, so that a side tunes itself and warms up on a quiet machine.
            process = start_side(side, workload, Effort())
            stack.enter_context(process)
            processes[process.side] = process
            warm = process.window(Visit(_WARM_UP_S))
            known = known and warm.foreign_share is not None
            print(f"{process.side.label}: about {warm.images_per_s:,.0f} images/s", flush=True)

        measurements = {side: Measurement(side, process.ready) for side, process in processes.items()}
        for side in by_turns(list(processes), options.repetitions):
            take = partial(processes[side].window, Visit(options.seconds))
            measurements[side].windows.add(take, max_foreign_share=options.max_foreign_share)
    return {
        "model": workload.model,
        "batch_size": workload.batch_size,
        "data": workload.data,
        "device": workload.device,
        "method": {
            "seconds": options.seconds,
            "repetitions": options.repetitions,
            "max_foreign_share": options.max_foreign_share,
            "foreign_load_known": known,
        },
        "rows": [to_row(measurement, workload.model, workload.batch_size) for measurement in measurements.values()],
        "ratios": ratios(list(measurements.values())),
    }


def _sides(options: argparse.Namespace, device: str, precisions: Sequence[PrecisionName]) -> list[Side]:
    fitting = sides_on(device)
    names = options.sides or fitting
    for name in names:
        if name not in fitting:
            raise UserError(f"side {name} does not run on {device}; leave it out of --sides.")
    learners = list(dict.fromkeys(options.num_learners))
    return plan_sides(names, learners, precisions, serial_learners=[1] if device == "cpu" else learners)


if __name__ == "__main__":
    raise SystemExit(main())
