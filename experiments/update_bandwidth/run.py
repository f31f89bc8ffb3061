"""GB/s of the update of a bank of learners, beside those of a copy.

    python experiments/update_bandwidth/run.py [--model vgg16 --num-learners 4 --device cpu] [--json PATH]

README.md says what is counted and how.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.core.errors import UserError
from crossbow_py.engine.modules.precision import choose_device
from experiments.bench.arguments import count, measuring_parser, positive
from experiments.bench.machine import machine
from experiments.bench.results import show_and_write
from experiments.bench.workloads import WORKLOAD_MODELS
from experiments.update_bandwidth.measure import measure_update
from experiments.update_bandwidth.report import result_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--model", choices=WORKLOAD_MODELS, default="vgg16", help="whose parameters (default %(default)s)")
    add("--num-learners", type=count, default=4, help="K (default %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default %(default)s")
    add("--seconds", type=positive, default=30.0, help="of measuring (default %(default)s)")
    options = parser.parse_args(argv)
    try:
        device = choose_device(options.device)
        result = {
            "machine": machine(),
            **measure_update(options.model, options.num_learners, device.type, options.seconds),
        }
    except UserError as error:
        parser.error(str(error))
    show_and_write(result, result_text, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
