"""What do K learners with averaged gradients cost, against one tuned model that takes their batches as one?

    python experiments/averaged_gradients/run.py [--models MODEL ...] [--num-learners K] [--json PATH]

README.md says what the sides are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch

from crossbow_py.averaging import SynchronousSGD
from crossbow_py.engine.modules.precision import FP32, PrecisionName, choose_device, choose_precision
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.train.run_settings import Choices, RunSettings
from crossbow_py.train.tuning.executor_choice import new_bank
from experiments.bench.gate import Visit
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.sides.side import Side
from experiments.bench.windows import by_turns, paired_ratios, spread
from experiments.bench.workers import SideProcess
from experiments.bench.workloads import WORKLOAD_MODELS, Effort, Workload, prepare
from experiments.tables.markdown import NONE, markdown_table, spread_text
from experiments.throughput.comparison import Measurement
from experiments.throughput.sides import start_side

_WARM_UP_S = 1.0
_EXECUTORS = ("fused", "fused_threads", "threads")
_HEAD = ("model", "side", "images/s", "÷ one tuned model", "weights and state, MB", "÷ one model's", "n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--device", "--max-foreign-share")
    add = parser.add_argument
    add("--models", choices=WORKLOAD_MODELS, nargs="+", default=["lenet", "resnet32"], help="default lenet resnet32")
    add("--batch-size", type=count, default=16, help="images in a batch of one learner (default %(default)s)")
    add("--num-learners", type=count, default=8, help="K (default %(default)s)")
    add("--executors", choices=_EXECUTORS, nargs="+", default=_EXECUTORS[:2], help="default fused fused_threads")
    add("--precision", choices=("auto", "fp32", "bf16"), nargs="+", default=["auto", "fp32"], help="default auto fp32")
    add("--seconds", type=positive, default=2.5, help="length of a window (default %(default)s)")
    add("--repetitions", type=count, default=7, help="windows a side (default %(default)s)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Raises SideError."""
    device = choose_device(given.device)
    chosen = dict.fromkeys(choose_precision(name, device) for name in given.precision)
    rows = []
    for model in given.models:
        with tempfile.TemporaryDirectory() as folder:
            workload = prepare(model, given.batch_size, device.type, Path(folder))
            for precision in chosen:
                name: PrecisionName = "fp32" if precision == FP32 else "bf16"
                rows += _compare(workload, name, given)
    return {"num_learners": given.num_learners, "batch_size": given.batch_size, "rows": rows}


def _compare(workload: Workload, precision: PrecisionName, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all sides of a model in turns. Raises SideError."""
    k = given.num_learners
    single = Side("tuned_single", 1, "none", precision)
    sides = {single: replace(workload, batch_size=k * given.batch_size)}
    sides |= {Side(name, k, "synchronous_sgd", precision): workload for name in given.executors}
    with ExitStack() as stack:
        processes: dict[Side, SideProcess] = {}
        for side, own in sides.items():
            processes[side] = stack.enter_context(start_side(side, own, Effort()))
            processes[side].window(Visit(_WARM_UP_S))
        measurements = {side: Measurement(side, process.ready) for side, process in processes.items()}
        for side in by_turns(list(processes), given.repetitions):
            take = partial(processes[side].window, Visit(given.seconds))
            measurements[side].windows.add(take, max_foreign_share=given.max_foreign_share)
    rates = {side: own.windows.rates() for side, own in measurements.items()}
    return [
        {
            "model": workload.model, **asdict(side), **measurements[side].windows.figures(),
            "ratios": spread(paired_ratios(rates[side], rates[single])),
            "bytes": _bytes(workload, side, precision), "bytes_of_one": _bytes(workload, single, precision),
        }
        for side in sides
    ]  # fmt: skip


def _bytes(workload: Workload, side: Side, precision: PrecisionName) -> int:
    """Count the memory of weights, their copies for passes and optimizer state."""
    device, rule = torch.device("cpu"), SynchronousSGD()
    settings = RunSettings(num_learners=side.num_learners, batch_size=workload.batch_size)
    executor = "serial" if side.num_learners == 1 else side.executor
    choices = Choices(device, choose_precision(precision, device), executor)
    bank = new_bank(
        workload.make_model(), side.num_learners, executor, settings, choices, SGD(), gradient_mean=rule.gradient_mean
    )
    rows = [bank.weights, *bank.state.values(), *([bank.shadow] if bank.precision.has_shadow else [])]
    return sum(each.storage.nbytes for each in rows)


def result_text(result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        k, ours = row["num_learners"], row["side"] != "tuned_single"
        batch = result["batch_size"] * (1 if ours else result["num_learners"])
        what = f"{row['side']}, K = {k}, b = {batch}" if ours else f"one tuned model, batches of {batch}"
        ratio = spread_text(row["ratios"]) if ours else "1"
        size = f"{row['bytes'] / 1e6:.2f}", f"{row['bytes'] / row['bytes_of_one']:.2f}"
        rate = NONE if row["images_per_s"] is None else f"{row['images_per_s']:,.0f}"
        rows.append([f"{row['model']} {row['precision']}", what, rate, ratio, *size, str(row["n"])])
    return markdown_table(_HEAD, rows)


TABLES = {"all": result_text}

if __name__ == "__main__":
    raise SystemExit(main())
