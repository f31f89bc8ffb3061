"""Images/s of every model, batch size, executor and number of learners, in minutes: the throughput suite.

    python experiments/throughput/suite.py [--device cpu|cuda] [--json PATH]

README.md says how cells are measured, and which are left out. The pictures are drawn beside the results file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.engine.modules.precision import BF16, PrecisionName, choose_device, choose_precision
from experiments.bench.program import count, measure_and_write, measuring_parser, positive
from experiments.bench.sides.side import EXECUTOR_SIDES
from experiments.bench.workers import process_context
from experiments.bench.workloads import WORKLOAD_MODELS, prepare_all
from experiments.throughput import planning
from experiments.throughput.campaign import Campaign, Plan
from experiments.throughput.planning import Limits
from experiments.throughput.report import MODEL_S, analyse, suite_text
from experiments.throughput.sides import run_side, sides_on
from experiments.throughput.suite_report import KIND, auto_of, left_out_of, ratios_of, rows_of

MODELS = ("mlp", "lenet", "resnet32", "vgg16")
BATCH_SIZES = (16, 32, 64)
NUM_LEARNERS = (1, 2, 4, 8, 16)
MINUTES = 5.0
# Of the time: starting Python before, and drawing after.
_ASIDE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    begun_s = time.monotonic()
    return measure_and_write(_parser(), argv, lambda given: measure_models(given, begun_s), suite_text, "throughput")


def measure_models(options: argparse.Namespace, begun_s: float) -> dict[str, Any]:
    """One model after another, each in its share of the time that is left of the budget."""
    chosen, known = choose_device(options.device), True
    device = chosen.type
    precision: PrecisionName = "bf16" if choose_precision("auto", chosen) == BF16 else "fp32"
    models = list(dict.fromkeys(options.models or default_models(device)))
    budget_s = max(0.0, 60 * options.minutes - _ASIDE_S - MODEL_S[device] * len(models))
    parts: dict[str, list[Any]] = {"rows": [], "left_out": [], "auto": [], "ratios": []}
    with ExitStack() as stack:
        process_context(run_side.__module__)  # the server to fork from is there when the images are
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workloads = prepare_all(models, min(options.batch_sizes), device, folder)
        plan = make_plan(options, device, precision)
        for number, model in enumerate(models):
            left_s = budget_s - (time.monotonic() - begun_s)
            with Campaign(workloads[model], plan, planning.share_s(left_s, models[number:], device)) as campaign:
                campaign.run()
            parts["rows"] += rows_of(model, campaign.measurements)
            parts["left_out"] += left_out_of(model, campaign.left_out)
            parts["auto"] += auto_of(model, campaign.measurements)
            parts["ratios"] += ratios_of(model, campaign.measurements)
            known = known and campaign.foreign_load_known
    result: dict[str, Any] = {
        "kind": KIND,
        "device": device,
        "precision": precision,
        "data": {model: workloads[model].data for model in models},
        "method": {
            "minutes": options.minutes,
            "took_s": 0.0,
            "passes": options.passes,
            "window_s": options.window_s,
            "lead_in_s": Limits.lead_in_s,
            "max_round_s": Limits.max_round_s,
            "max_foreign_share": options.max_foreign_share,
            "foreign_load_known": known,
        },
        **parts,
    }
    result["roofline"] = analyse(result, device, precision)
    result["method"]["took_s"] = round(time.monotonic() - begun_s, 1)
    return result


def default_models(device: str) -> tuple[str, ...]:
    """ResNet-50 on images of 224 pixels is for devices that do not take seconds for a round of it."""
    return (*MODELS, "resnet50") if device == "cuda" else MODELS


def make_plan(options: argparse.Namespace, device: str, precision: PrecisionName) -> Plan:
    batch_sizes, learners = (list(dict.fromkeys(values)) for values in (options.batch_sizes, options.num_learners))
    executors = [name for name in sides_on(device) if name in EXECUTOR_SIDES]
    captures = device == "cuda"
    cells = planning.plan_cells(batch_sizes, learners, executors, precision, captures)
    limits = Limits(passes=options.passes, window_s=options.window_s, captures=captures)
    return Plan(cells, limits, options.max_foreign_share)


def _parser() -> argparse.ArgumentParser:
    parser = measuring_parser(
        __doc__, "--device", "--max-foreign-share", written="write the results there, and draw them beside it"
    )
    add = parser.add_argument
    add("--models", choices=WORKLOAD_MODELS, nargs="+", help=f"default {' '.join(MODELS)}, and resnet50 on CUDA")
    add("--batch-sizes", type=count, nargs="+", default=BATCH_SIZES, help="images a learner takes (default 16 32 64)")
    add("--num-learners", type=count, nargs="+", default=NUM_LEARNERS, help="K (default 1 2 4 8 16)")
    add("--minutes", type=positive, default=MINUTES, help="all of it takes no longer (default %(default)s)")
    add("--passes", type=count, default=Limits.passes, help="windows a cell (default %(default)s)")
    add("--window-s", type=positive, default=Limits.window_s, help="length of a window (default %(default)s)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
