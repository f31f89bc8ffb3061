"""Images/s of training for several numbers of workers and batch sizes, and what the sizing rule recommends.

    python experiments/workers/run.py [--batch-sizes 4 8 16 32 64 --workers 0 1 2 3 4] [--json PATH]

README.md says what is compared and how.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.core.errors import UserError
from experiments.bench.arguments import count, measuring_parser, positive
from experiments.bench.machine import machine
from experiments.bench.results import show_and_write
from experiments.workers.measure import measure_workers
from experiments.workers.report import result_text

BATCH_SIZES = (4, 8, 16, 32, 64)
NUM_WORKERS = (1, 2, 3, 4)


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--folder", default="flowers_300", help="the images: a path, or a name in $CROSSBOW_DATA_DIR (%(default)s)")
    add("--batch-sizes", type=count, nargs="+", default=BATCH_SIZES, metavar="B", help="samples a batch")
    add("--workers", type=count, nargs="+", default=NUM_WORKERS, metavar="W", help="processes, beside none")
    add("--seconds", type=positive, default=1.2, help="of a window (default %(default)s)")
    add("--repetitions", type=count, default=3, help="windows a point (default %(default)s)")
    given = parser.parse_args(argv)
    try:
        measured = measure_workers(given.folder, given.batch_sizes, given.workers, given.seconds, given.repetitions)
    except UserError as error:
        parser.error(str(error))
    result = {"machine": machine(), **measured}
    show_and_write(result, result_text, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
