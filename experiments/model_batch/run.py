"""Many small models at once, as in ModelBatch's figures 2 and 4 and in Pack, against the same models one at a time.

    python experiments/model_batch/run.py training [--json PATH]

README.md says what the figures and sides are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
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
from experiments.bench.packs.models import BUILDS, FIVE_LAYERS_WIDTHS, MLP_UNITS
from experiments.bench.packs.report import (
    Result,
    Row,
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
from experiments.bench.packs.side import (
    DEFAULT,
    DEFAULT_ENSEMBLE,
    ONE_AT_A_TIME,
    TUNED,
    PackSide,
    Work,
    packed,
    prepare_packs,
    single,
)
from experiments.bench.program import count, measure_and_write
from experiments.tables.markdown import NONE, cores, markdown_table, spread_text

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_FEWER = (1, 4, 16, 64)
_LARGER = (4, 16, 64, 256)
_USUAL = 16  # images in a batch
# The families whose limits are looked for, and the same models with narrower and wider layers.
LIMITS = {
    "five_layers": tuple(f"five_layers_{width}" for width in FIVE_LAYERS_WIDTHS),
    "mlp": tuple(f"mlp_{units}" for units in MLP_UNITS),
}
# What the first page says of results, with batches of the usual size.
_ON_FIRST_PAGE = {
    "gru": "Training 16 GRUs",
    "small_mlp_training": "Training 16 MLPs",
    "training": "Training 16 five-layer CNNs",
}


@dataclass(frozen=True)
class PackFigure:
    """A figure: models, each with a batch size, that have a panel each; packs of how many; and what they do."""

    title: str
    panels: tuple[tuple[str, int], ...]
    num_models: tuple[int, ...] = (16,)
    work: Work = "training"


def _by_size(model: str, sizes: Sequence[int] = _BATCH_SIZES) -> tuple[tuple[str, int], ...]:
    return tuple((model, size) for size in sizes)


FIGURES = {
    "layers": PackFigure(
        "figure 2: forward and backward of fully connected layers", _by_size("layer", (*_BATCH_SIZES, 256)), (64,),
        "layers",
    ),
    "training": PackFigure("figure 4: training five-layer networks", _by_size("five_layers")),
    "inference": PackFigure("figure 4: inference by five-layer networks", _by_size("five_layers"), work="inference"),
    "mlp_training": PackFigure("training MLPs", _by_size("mlp")),
    "mlp_inference": PackFigure("inference by MLPs", _by_size("mlp"), work="inference"),
    "lstm": PackFigure("future work: training LSTMs on rows of digits", _by_size("lstm", _FEWER)),
    "gru": PackFigure("future work: training GRUs on rows of digits", _by_size("gru", _FEWER)),
    "families": PackFigure(
        "four families in packs of 2 to 16",
        tuple((model, _USUAL) for model in ("resnet20", "mobilenet", "densenet40", "mlp")), (2, 4, 8, 16),
    ),
    "limits": PackFigure(
        "larger batches and wider layers, in packs of 4",
        (*(each for model in LIMITS for each in _by_size(model, _LARGER)),
         *((model, _USUAL) for models in LIMITS.values() for model in models)),
        (4,),
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = pack_parser(__doc__, repetitions=5, seconds=0.5)
    add = parser.add_argument
    add("figure", choices=FIGURES, help="what is measured")
    add("--batch-sizes", type=count, nargs="+", metavar="B", help="images in a batch of one model")
    add("--models", choices=BUILDS, nargs="+", metavar="MODEL", help="which models (default: the figure's)")
    add("--num-models", type=count, nargs="+", metavar="K", help="models in a pack (default: the figure's)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device, figure = choose_device(given.device).type, chosen(given)
    if given.quick:
        figure = replace(figure, panels=((figure.panels[0][0], 4),), num_models=(2,))
        given.repetitions, given.seconds = 1, 0.05
    with tempfile.TemporaryDirectory() as folder:
        workloads = prepare_packs(list(dict.fromkeys(model for model, _ in figure.panels)), device, Path(folder))
        sides = sides_of(figure, device)
        panels = [[PackCell(side, workloads[model].at(size)) for side in sides] for model, size in figure.panels]
        measured = measure_panels(panels, given, device)
    return {**measured, "figure": asdict(figure)}


def chosen(given: argparse.Namespace) -> PackFigure:
    """The figure that was asked for, with other models, batch sizes or packs where these are given."""
    figure = FIGURES[given.figure]
    if given.models or given.batch_sizes:
        models, sizes = (dict.fromkeys(each) for each in zip(*figure.panels, strict=True))
        panels = product(dict.fromkeys(given.models or models), dict.fromkeys(given.batch_sizes or sizes))
        figure = replace(figure, panels=tuple(panels))
    return replace(figure, num_models=tuple(dict.fromkeys(given.num_models or figure.num_models)))


def sides_of(figure: PackFigure, device: str) -> list[PackSide]:
    """One model at a time, and packs of every size."""
    work = figure.work
    if work == "layers":  # here all of the models are gone through in every tick
        return [PackSide(name, n, work=work) for n in figure.num_models for name in (DEFAULT, TUNED, "fused")]
    singles = one_at_a_time(device) if work == "training" else (DEFAULT, TUNED)
    together = executors_on(device) if work == "training" else (DEFAULT_ENSEMBLE, *predictors_on(device))
    return [
        *(single(name, work) for name in singles),
        *(packed(name, number, work) for number in figure.num_models for name in together),
    ]


def panels_of(result: Result) -> list[list[Row]]:
    """The rows of every model, batch size and number of models in a pack, with those of one model at a time."""
    panels = []
    for own in grouped(result["rows"], "model", "batch_size").values():
        singles = [row for row in own if row["side"] in ONE_AT_A_TIME]
        packs = [row for row in own if row["side"] not in ONE_AT_A_TIME]
        panels += [[*singles, *of_size] for of_size in grouped(packs, "num_models").values()]
    return panels


def title_of(result: Result) -> str:
    """The title of the figure, of which results of before there was one program say only the name."""
    title: str = result["figure"]["title"] if "figure" in result else FIGURES[result["part"]].title
    return title


def headline(result: Result) -> str:
    said = [f"{title_of(result)}."]
    packs = [pack for rows in panels_of(result) if (pack := best_pack(rows)) is not None]
    for base in bases_of(result["rows"]):
        if found := [pack for pack in packs if pack["over"][base] is not None]:
            best = max(found, key=lambda pack: float(pack["over"][base]["median"]))
            ratio = spread_text(best["over"][base])
            said.append(f"The largest gain over {base} is {ratio}, of {_name(best)} by {best['side']} (n={best['n']}).")
    if losing := [_name(pack) for pack in packs if pack["over"][TUNED] and pack["over"][TUNED]["median"] < 1]:
        said.append(f"Packing does not pay over one tuned model at a time for {'; '.join(losing)}.")
    return " ".join(said)


def _name(row: Row) -> str:
    return f"{row['num_models']} {row['model']} with batches of {row['batch_size']}"


def summary_table(result: Result) -> str:
    lines = [[rows[0]["model"], str(rows[0]["batch_size"]), *summary_row(rows)] for rows in panels_of(result)]
    return markdown_table(["model", "b", *summary_header(result["rows"])], lines)


def result_text(result: Result) -> str:
    rows = result["rows"]
    parts = (headline(result), summary_table(result), cells_table(rows), how(result), left_out(rows))
    return "\n\n".join(part for part in parts if part)


def headline_rows(results: Mapping[str, Result]) -> list[list[str]]:
    lines = []
    for name, title in _ON_FIRST_PAGE.items():
        rows = grouped(results[name]["rows"], "batch_size")[_USUAL,]
        pack = best_pack(rows)
        assert pack is not None, f"{name} was measured"
        fastest = f"{pack['images_per_s']:,.0f} ({pack['side']})"
        rates = [f"{row['images_per_s']:,.0f}" if (row := row_of(rows, side)) else NONE for side in (TUNED, DEFAULT)]
        lines.append([f"{title}, batches of {_USUAL}, images/s", fastest, *rates, str(pack["n"]), cores(results[name])])
    return lines


TABLES = {"all": result_text}
HEADLINE = headline_rows


if __name__ == "__main__":
    raise SystemExit(main())
