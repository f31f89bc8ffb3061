"""Hyperband with packs against Hyperband one trial at a time: wall time and best accuracy, same trials and budget.

    python experiments/hyperband/run.py [--device cpu|cuda] [--repetitions 3] [--json PATH] [KEY=VALUE ...]

README.md says what the sides are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.core.errors import UserError
from crossbow_py.data.sources.mnist import Mnist
from crossbow_py.engine.modules.precision import choose_device
from experiments.bench.arguments import count, measuring_parser
from experiments.bench.machine import machine
from experiments.bench.results import show_and_write
from experiments.hyperband.measure import measure_hyperband
from experiments.hyperband.report import result_text

DEFAULTS = ("+experiment=search_lenet", "max_epochs=1", "min_epochs=0.1111111111")
# As many images of MNIST's shape.
SYNTHETIC = ("data=synthetic", "data.shape=[1,28,28]", "data.num_train=60000", "data.num_test=10000")


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default %(default)s")
    add("--repetitions", type=count, default=3, help="searches by each side (default %(default)s)")
    add("overrides", nargs="*", metavar="KEY=VALUE", help=f"of the search (default {' '.join(DEFAULTS)})")
    options = parser.parse_args(argv)
    try:
        device = choose_device(options.device).type
    except UserError as error:
        parser.error(str(error))
    measured = measure_hyperband(options.overrides or default_search(), options.repetitions, device)
    result = {"machine": machine(), **measured}
    show_and_write(result, result_text, options.json)
    return 0


def default_search() -> tuple[str, ...]:
    """LeNet on MNIST when that is here and whole, else on synthetic images."""
    try:
        Mnist(download=False).load(progress=False)
    except UserError as error:
        print(f"synthetic images instead of MNIST: {error}", flush=True)
        return (*DEFAULTS, *SYNTHETIC)
    return DEFAULTS


if __name__ == "__main__":
    raise SystemExit(main())
