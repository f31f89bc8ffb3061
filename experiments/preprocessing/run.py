"""The share of time spent on preprocessing by 1 to 16 models, with a feed each and on one feed.

    python experiments/preprocessing/run.py [--models 1 2 4 8 16] [--json PATH]

README.md says what is compared and how.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.core.errors import UserError
from experiments.bench.arguments import count, measuring_parser
from experiments.bench.machine import machine
from experiments.bench.results import show_and_write
from experiments.preprocessing.measure import measure_preprocessing
from experiments.preprocessing.report import result_text

NUM_MODELS = (1, 2, 4, 8, 16)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--folder", default="flowers_300", help="the images: a path, or a name in $CROSSBOW_DATA_DIR (%(default)s)")
    add("--models", type=count, nargs="+", default=NUM_MODELS, metavar="K", help="models on one feed")
    add("--rounds", type=count, default=24, help="of a window (default %(default)s)")
    add("--repetitions", type=count, default=7, help="windows a side (default %(default)s)")
    options = parser.parse_args(argv)
    try:
        measured = measure_preprocessing(options.folder, options.models, options.rounds, options.repetitions)
    except UserError as error:
        parser.error(str(error))
    result = {"machine": machine(), **measured}
    show_and_write(result, result_text, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
