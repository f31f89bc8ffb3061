"""Measures packs of 2 to 16 models against one model at a time: four families, mixed packs, and the limits.

    python experiments/pack_step_time/run.py families [--json PATH]

README.md says what the parts and sides are.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.bench.arguments import count
from experiments.bench.packs.models import BUILDS
from experiments.bench.packs.running import device_of, measure_panels, pack_parser
from experiments.bench.packs.workloads import prepare_packs
from experiments.bench.results import show_and_write
from experiments.pack_step_time.parts import PARTS, Plan, models_of
from experiments.pack_step_time.report import result_text

_QUICK = Plan(families=("mlp", "lenet"), num_models=(2,), batch_size=4)
_QUICK_PANELS = 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = pack_parser(__doc__, repetitions=5, seconds=0.4)
    parser.add_argument("part", choices=PARTS, help="what is measured")
    parser.add_argument("--families", choices=BUILDS, nargs="+", default=Plan.families, metavar="MODEL",
                        help=f"default {' '.join(Plan.families)}")  # fmt: skip
    parser.add_argument("--num-models", type=count, nargs="+", default=Plan.num_models, metavar="K",
                        help="models in a pack (default 2 4 8 16)")  # fmt: skip
    parser.add_argument("--batch-size", type=count, default=Plan.batch_size, help="default %(default)s")
    options = parser.parse_args(argv)
    device = device_of(parser, options)
    plan = Plan(tuple(dict.fromkeys(options.families)), tuple(dict.fromkeys(options.num_models)), options.batch_size)
    if options.part == "mixed" and device == "cuda":
        parser.error("mixed packs are measured on a CPU, got --device cuda; give --device cpu.")
    if options.quick:
        plan, options.repetitions, options.seconds = _QUICK, 1, 0.05
    with tempfile.TemporaryDirectory() as folder:
        workloads = prepare_packs(models_of(options.part, plan), device, Path(folder))
        panels = PARTS[options.part](plan, workloads, device)
        measured = measure_panels(panels[: _QUICK_PANELS if options.quick else None], options, device)
    result = {**measured, "part": options.part, "batch_size": plan.batch_size}
    show_and_write(result, result_text, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
