"""What does a checkpoint cost training?

    python experiments/checkpoint/run.py [--model resnet50 --num-learners 10 --seconds 300] [--json PATH]

README.md says what is measured and how.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.bench.arguments import count, measuring_parser, positive
from experiments.bench.machine import machine, usable_cores
from experiments.bench.results import show_and_write
from experiments.checkpoint.measure import WRITTEN_MODELS, measure_checkpoints
from experiments.checkpoint.report import result_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--model", choices=WRITTEN_MODELS, default="resnet50", help="whose bank is written (default %(default)s)")
    add("--num-learners", type=count, default=10, help="in that bank (default %(default)s)")
    add("--beside", choices=("resnet20", "resnet32"), default="resnet32", help="what is trained (default %(default)s)")
    add("--threads", type=count, default=usable_cores(), help="that train, a learner each (default all cores)")
    add("--seconds", type=positive, default=300.0, help="of measuring (default %(default)s)")
    add("--folder", type=Path, help="on the disk to write to (default that for temporary files)")
    options = parser.parse_args(argv)
    facts = machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure_checkpoints(
            options.model, options.num_learners, options.beside, options.threads, options.seconds, Path(folder)
        )
    result = {"machine": facts, **found}
    show_and_write(result, result_text, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
