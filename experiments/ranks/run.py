"""Two ranks on two cores against one rank on one, against no averaging, and against DistributedDataParallel.

    python experiments/ranks/run.py [--model resnet32 --batch-size 32] [--json PATH]

README.md says what the sides are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.bench.arguments import count, measuring_parser
from experiments.bench.machine import machine
from experiments.bench.results import show_and_write
from experiments.ranks.measure import measure_ranks
from experiments.ranks.report import result_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--model", choices=("resnet32", "vgg16", "lenet"), default="resnet32", help="default %(default)s")
    add("--batch-size", type=count, default=32, help="of a rank (default %(default)s)")
    add("--rounds", type=count, default=8, help="in a window (default %(default)s)")
    add("--repetitions", type=count, default=10, help="windows of each side (default %(default)s)")
    options = parser.parse_args(argv)
    measured = measure_ranks(options.model, options.batch_size, options.rounds, options.repetitions)
    result = {"machine": machine(), **measured}
    show_and_write(result, result_text, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
