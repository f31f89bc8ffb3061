"""Many small models at once, as in ModelBatch's figures 2 and 4, against the same models one at a time.

    python experiments/model_batch/run.py training [--json PATH]

README.md says what the figures and sides are.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.bench.arguments import count
from experiments.bench.packs.models import BUILDS
from experiments.bench.packs.running import device_of, measure_panels, pack_parser
from experiments.bench.packs.workloads import prepare_packs
from experiments.bench.results import show_and_write
from experiments.model_batch.figures import FIGURES, panels_of
from experiments.model_batch.report import result_text

_QUICK_MODELS, _QUICK_BATCH_SIZE = 2, 4


def main(argv: Sequence[str] | None = None) -> int:
    parser = pack_parser(__doc__, repetitions=5, seconds=0.5)
    parser.add_argument("figure", choices=FIGURES, help="what is measured")
    parser.add_argument("--batch-sizes", type=count, nargs="+", metavar="B", help="images in a batch of one model")
    parser.add_argument("--model", choices=BUILDS, metavar="MODEL", help="which model (default: the figure's)")
    parser.add_argument("--num-models", type=count, metavar="K", help="how many models (default: the figure's)")
    options = parser.parse_args(argv)
    device, figure = device_of(parser, options), FIGURES[options.figure]
    figure = replace(figure, model=options.model or figure.model, num_models=options.num_models or figure.num_models)
    sizes = list(dict.fromkeys(options.batch_sizes or figure.batch_sizes))
    if options.quick:
        figure, sizes = replace(figure, num_models=_QUICK_MODELS), [_QUICK_BATCH_SIZE]
        options.repetitions, options.seconds = 1, 0.05
    with tempfile.TemporaryDirectory() as folder:
        workload = prepare_packs([figure.model], device, Path(folder))[figure.model]
        measured = measure_panels(panels_of(figure, workload, sizes), options, device)
    result = {**measured, "figure": asdict(replace(figure, batch_sizes=tuple(sizes)))}
    show_and_write(result, result_text, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
