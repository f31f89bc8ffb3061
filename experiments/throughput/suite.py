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
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.engine.precision import BF16, PrecisionName, choose_device, choose_precision
from crossbow_py.errors import UserError
from experiments.common.arguments import count, positive
from experiments.common.machine import machine, machine_line
from experiments.common.results import write_result
from experiments.throughput import planning
from experiments.throughput.campaign import Campaign, Plan
from experiments.throughput.planning import Limits
from experiments.throughput.sides import EXECUTOR_SIDES, sides_on
from experiments.throughput.suite_report import KIND, auto_of, left_out_of, ratios_of, result_text, rows_of
from experiments.throughput.workers import process_context
from experiments.throughput.workloads import WORKLOAD_MODELS, Workload, prepare_all

MODELS = ("mlp", "lenet", "resnet32", "vgg16")
BATCH_SIZES = (16, 32, 64)
NUM_LEARNERS = (1, 2, 4, 8, 16)
MINUTES = 5.0
# Of the time: starting Python before, and drawing after.
_ASIDE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as asked for; prints the tables and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    begun_s = time.monotonic()
    try:
        device = choose_device(options.device)
        precision: PrecisionName = "bf16" if choose_precision("auto", device) == BF16 else "fp32"
    except UserError as error:
        parser.error(str(error))
    result = measure_models(options, device.type, precision, begun_s)
    print(f"\n{result_text(result)}\n\n{machine_line(result['machine'])}")
    if options.json:
        write_result(options.json, result)
        print(f"written to {options.json}")
        _draw(options.json)
    return 0


def measure_models(
    options: argparse.Namespace, device: str, precision: PrecisionName, begun_s: float
) -> dict[str, Any]:
    """One model after another, each in its share of the time that is left of the budget."""
    facts, limits = machine(), Limits(passes=options.passes, window_s=options.window_s)
    budget_s = max(0.0, 60 * options.minutes - _ASIDE_S)
    models, batch_sizes, learners = (
        list(dict.fromkeys(values)) for values in (options.models, options.batch_sizes, options.num_learners)
    )
    executors = [name for name in sides_on(device) if name in EXECUTOR_SIDES]
    plan = Plan(planning.plan_cells(batch_sizes, learners, executors, precision), limits, options.max_foreign_share)
    parts: dict[str, list[Any]] = {"rows": [], "left_out": [], "auto": [], "ratios": []}
    data, known = {}, True
    process_context()  # starts what processes are forked from, so that it is there when the images are
    with tempfile.TemporaryDirectory() as folder:
        workloads = prepare_all(models, batch_sizes[0], device, Path(folder))
        for number, model in enumerate(models):
            left_s = budget_s - (time.monotonic() - begun_s)
            campaign = measure_model(workloads[model], plan, planning.share_s(left_s, models[number:]))
            parts["rows"] += rows_of(model, campaign.measurements)
            parts["left_out"] += left_out_of(model, campaign.left_out)
            parts["auto"] += auto_of(model, campaign.measurements)
            parts["ratios"] += ratios_of(model, campaign.measurements)
            data[model], known = workloads[model].data, known and campaign.foreign_load_known
    return {
        "kind": KIND,
        "machine": facts,
        "device": device,
        "precision": precision,
        "data": data,
        "method": {
            "minutes": options.minutes,
            "took_s": round(time.monotonic() - begun_s, 1),
            "passes": limits.passes,
            "window_s": limits.window_s,
            "lead_in_s": limits.lead_in_s,
            "max_round_s": limits.max_round_s,
            "max_foreign_share": options.max_foreign_share,
            "foreign_load_known": known,
        },
        **parts,
    }


def measure_model(workload: Workload, plan: Plan, budget_s: float) -> Campaign:
    """All that there is time for; the processes have ended afterwards."""
    with Campaign(workload, plan, budget_s) as campaign:
        campaign.run()
    return campaign


def _draw(path: Path) -> None:
    """The pictures, beside the results; matplotlib is an extra."""
    try:
        from experiments.throughput.suite_plot import draw_files  # noqa: PLC0415
    except ImportError as error:
        print(f"no pictures: {error}; pip install '.[plots]', then python experiments/throughput/suite_plot.py {path}")
        return
    for picture in draw_files(path):
        print(f"drawn to {picture}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--models", choices=WORKLOAD_MODELS, nargs="+", default=MODELS, help=f"default {' '.join(MODELS)}")
    add("--batch-sizes", type=count, nargs="+", default=BATCH_SIZES, help="images a learner takes (default 16 32 64)")
    add("--num-learners", type=count, nargs="+", default=NUM_LEARNERS, help="K (default 1 2 4 8 16)")
    add("--minutes", type=positive, default=MINUTES, help="all of it takes no longer (default %(default)s)")
    add("--passes", type=count, default=Limits.passes, help="windows a cell (default %(default)s)")
    add("--window-s", type=positive, default=Limits.window_s, help="length of a window (default %(default)s)")
    add("--max-foreign-share", type=positive, default=0.15,
        help="drop windows in which others take a larger share of the cores (default %(default)s)")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default %(default)s")
    add("--json", type=Path, metavar="PATH", help="write the results there, and draw them beside it")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
