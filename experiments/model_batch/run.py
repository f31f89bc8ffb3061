"""Many small models at once, as in ModelBatch's figures 2 and 4, against the same models one at a time.

    python experiments/model_batch/run.py training [--json PATH]

README.md says what the figures and sides are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from crossbow_py.engine.modules.precision import choose_device
from experiments.bench.packs.comparison import (
    PackCell,
    executors_on,
    measure_panels,
    one_at_a_time,
    pack_parser,
    predictors_on,
)
from experiments.bench.packs.models import BUILDS
from experiments.bench.packs.report import (
    Result,
    bases_of,
    best_pack,
    cells_table,
    grouped,
    how,
    left_out,
    row_of,
    summary_header,
    summary_row,
)
from experiments.bench.packs.side import DEFAULT, DEFAULT_ENSEMBLE, TUNED, PackSide, Work, packed, prepare_packs, single
from experiments.bench.program import count, measure_and_write
from experiments.tables.markdown import NONE, cores, markdown_table, spread_text

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_FEWER = (1, 4, 16, 64)
_QUICK_MODELS, _QUICK_BATCH_SIZE = 2, 4
# What the first page says of results, with batches of this size.
_ON_FIRST_PAGE = {
    "gru": "Training 16 GRUs",
    "small_mlp_training": "Training 16 MLPs",
    "training": "Training 16 five-layer CNNs",
}
_BATCH_SIZE_ON_FIRST_PAGE = 16


def main(argv: Sequence[str] | None = None) -> int:
    parser = pack_parser(__doc__, repetitions=5, seconds=0.5)
    parser.add_argument("figure", choices=FIGURES, help="what is measured")
    parser.add_argument("--batch-sizes", type=count, nargs="+", metavar="B", help="images in a batch of one model")
    parser.add_argument("--model", choices=BUILDS, metavar="MODEL", help="which model (default: the figure's)")
    parser.add_argument("--num-models", type=count, metavar="K", help="how many models (default: the figure's)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device, figure = choose_device(given.device).type, FIGURES[given.figure]
    figure = replace(figure, model=given.model or figure.model, num_models=given.num_models or figure.num_models)
    sizes = list(dict.fromkeys(given.batch_sizes or figure.batch_sizes))
    if given.quick:
        figure, sizes = replace(figure, num_models=_QUICK_MODELS), [_QUICK_BATCH_SIZE]
        given.repetitions, given.seconds = 1, 0.05
    with tempfile.TemporaryDirectory() as folder:
        workload = prepare_packs([figure.model], device, Path(folder))[figure.model]
        sides = sides_of(figure, device)
        panels = [[PackCell(side, workload.at(size)) for side in sides] for size in sizes]
        measured = measure_panels(panels, given, device)
    return {**measured, "figure": asdict(replace(figure, batch_sizes=tuple(sizes)))}


@dataclass(frozen=True)
class ModelBatchFigure:
    """A figure: how many of which model, what they do, and over which batch sizes."""

    title: str
    model: str
    num_models: int
    work: Work
    batch_sizes: tuple[int, ...]


FIGURES = {
    "layers": ModelBatchFigure(
        "figure 2: forward and backward of fully connected layers", "layer", 64, "layers", (*_BATCH_SIZES, 256)
    ),
    "training": ModelBatchFigure("figure 4: training five-layer networks", "five_layers", 16, "training", _BATCH_SIZES),
    "inference": ModelBatchFigure(
        "figure 4: inference by five-layer networks", "five_layers", 16, "inference", _BATCH_SIZES
    ),
    "mlp_training": ModelBatchFigure("training MLPs", "mlp", 16, "training", _BATCH_SIZES),
    "mlp_inference": ModelBatchFigure("inference by MLPs", "mlp", 16, "inference", _BATCH_SIZES),
    "lstm": ModelBatchFigure("future work: training LSTMs on rows of digits", "lstm", 16, "training", _FEWER),
    "gru": ModelBatchFigure("future work: training GRUs on rows of digits", "gru", 16, "training", _FEWER),
}


def sides_of(figure: ModelBatchFigure, device: str) -> list[PackSide]:
    if figure.work == "layers":  # here all of the models are gone through in every tick
        return [PackSide(name, figure.num_models, work=figure.work) for name in (DEFAULT, TUNED, "fused")]
    training = figure.work == "training"
    singles = one_at_a_time(device) if training else (DEFAULT, TUNED)
    together = executors_on(device) if training else (DEFAULT_ENSEMBLE, *predictors_on(device))
    return [
        *(single(name, figure.work) for name in singles),
        *(packed(name, figure.num_models, figure.work) for name in together),
    ]


def headline(result: Result) -> str:
    figure = result["figure"]
    text = f"{figure['title']}: {figure['num_models']} models ({figure['model']})."
    packs = [best_pack(rows) for rows in grouped(result["rows"], "batch_size").values()]
    for base in bases_of(result["rows"]):
        found = [pack for pack in packs if pack is not None and pack["over"][base] is not None]
        if found:
            best = max(found, key=lambda pack: float(pack["over"][base]["median"]))
            text += (
                f" The largest gain over {base} is {spread_text(best['over'][base])}, with batches of "
                f"{best['batch_size']} by {best['side']} (n={best['n']})."
            )
    return text


def summary_table(result: Result) -> str:
    groups = grouped(result["rows"], "batch_size")
    lines = [[str(size), *summary_row(rows)] for (size,), rows in groups.items()]
    return markdown_table(["b", *summary_header(result["rows"])], lines)


def result_text(result: Result) -> str:
    rows = result["rows"]
    parts = (headline(result), summary_table(result), cells_table(rows), how(result), left_out(rows))
    return "\n\n".join(part for part in parts if part)


def headline_rows(results: Mapping[str, Result]) -> list[list[str]]:
    size, lines = _BATCH_SIZE_ON_FIRST_PAGE, []
    for name, title in _ON_FIRST_PAGE.items():
        rows = grouped(results[name]["rows"], "batch_size")[size,]
        pack = best_pack(rows)
        assert pack is not None, f"{name} was measured"
        fastest = f"{pack['images_per_s']:,.0f} ({pack['side']})"
        rates = [f"{row['images_per_s']:,.0f}" if (row := row_of(rows, side)) else NONE for side in (TUNED, DEFAULT)]
        lines.append([f"{title}, batches of {size}, images/s", fastest, *rates, str(pack["n"]), cores(results[name])])
    return lines


TABLES = {"all": result_text}
HEADLINE = headline_rows


if __name__ == "__main__":
    raise SystemExit(main())
