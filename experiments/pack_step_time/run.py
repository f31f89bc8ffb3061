"""Measures packs of 2 to 16 models against one model at a time: four families, and the limits.

    python experiments/pack_step_time/run.py families [--json PATH]

README.md says what the parts and sides are.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
)
from experiments.bench.packs.models import BUILDS, FIVE_LAYERS_WIDTHS, MLP_UNITS
from experiments.bench.packs.report import (
    Result,
    Row,
    best_pack,
    cells_table,
    grouped,
    how,
    left_out,
    summary_header,
    summary_row,
)
from experiments.bench.packs.side import (
    CAPTURED,
    DEFAULT,
    ONE_AT_A_TIME,
    TUNED,
    PackWorkload,
    packed,
    prepare_packs,
    single,
)
from experiments.bench.program import count, measure_and_write
from experiments.tables.markdown import markdown_table, spread_text

LIMIT_MODELS = 4
LARGER_BATCHES = (4, 16, 64, 256)
LARGER_MODELS = {
    "five_layers": tuple(f"five_layers_{width}" for width in FIVE_LAYERS_WIDTHS),
    "mlp": tuple(f"mlp_{units}" for units in MLP_UNITS),
}
Workloads = Mapping[str, PackWorkload]
Panel = list[PackCell]
_QUICK_PANELS = 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = pack_parser(__doc__, repetitions=5, seconds=0.4)
    add = parser.add_argument
    add("part", choices=PARTS, help="what is measured")
    add("--families", choices=BUILDS, nargs="+", default=Plan.families, metavar="MODEL",
        help=f"default {' '.join(Plan.families)}")  # fmt: skip
    add("--num-models", type=count, nargs="+", default=Plan.num_models, metavar="K",
        help="models in a pack (default 2 4 8 16)")  # fmt: skip
    add("--batch-size", type=count, default=Plan.batch_size, help="default %(default)s")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = choose_device(given.device).type
    plan = Plan(tuple(dict.fromkeys(given.families)), tuple(dict.fromkeys(given.num_models)), given.batch_size)
    if given.quick:
        plan, given.repetitions, given.seconds = _QUICK, 1, 0.05
    with tempfile.TemporaryDirectory() as folder:
        workloads = prepare_packs(models_of(given.part, plan), device, Path(folder))
        panels = PARTS[given.part](plan, workloads, device)
        measured = measure_panels(panels[: _QUICK_PANELS if given.quick else None], given, device)
    return {**measured, "part": given.part, "batch_size": plan.batch_size}


@dataclass(frozen=True)
class Plan:
    """Names of models, how many of them are packed, and how many images a batch has."""

    families: Sequence[str] = ("resnet20", "mobilenet", "densenet40", "mlp")
    num_models: Sequence[int] = (2, 4, 8, 16)
    batch_size: int = 16


_QUICK = Plan(families=("mlp", "lenet"), num_models=(2,), batch_size=4)


def family_panels(plan: Plan, workloads: Workloads, device: str) -> list[Panel]:
    """A panel a family: one model at a time, and packs of every size."""
    return [
        [*_singles(workload, device), *(cell for count in plan.num_models for cell in _packs(workload, count, device))]
        for workload in (workloads[family].at(plan.batch_size) for family in plan.families)
    ]


def limit_panels(plan: Plan, workloads: Workloads, device: str) -> list[Panel]:
    """Packs of a few models, with larger batches and with wider layers: a panel each."""
    count = min(LIMIT_MODELS, max(plan.num_models))
    larger = [workloads[model].at(size) for model in LARGER_MODELS for size in LARGER_BATCHES]
    wider = [workloads[model].at(plan.batch_size) for models in LARGER_MODELS.values() for model in models]
    return [[*_bases(workload), *_packs(workload, count, device)] for workload in (*larger, *wider)]


PARTS: dict[str, Callable[[Plan, Workloads, str], list[Panel]]] = {
    "families": family_panels,
    "limits": limit_panels,
}


def models_of(part: str, plan: Plan) -> list[str]:
    if part != "limits":
        return list(plan.families)
    return [*LARGER_MODELS, *(model for models in LARGER_MODELS.values() for model in models)]


def _singles(workload: PackWorkload, device: str) -> Panel:
    return [PackCell(single(side), workload) for side in one_at_a_time(device)]


def _bases(workload: PackWorkload) -> Panel:
    sides = (DEFAULT, TUNED, CAPTURED) if workload.device == "cuda" else (DEFAULT, TUNED)
    return [PackCell(single(side), workload) for side in sides]


def _packs(workload: PackWorkload, num_models: int, device: str) -> Panel:
    return [PackCell(packed(executor, num_models), workload) for executor in executors_on(device)]


def families_table(rows: Sequence[Row]) -> str:
    lines = []
    for (model,), own in grouped(rows, "model").items():
        singles = [row for row in own if row["side"] in ONE_AT_A_TIME]
        packs = [row for row in own if row["side"] not in ONE_AT_A_TIME]
        sizes = grouped(packs, "num_models").values()
        lines += [[model, *summary_row([*singles, *of_size])] for of_size in sizes]
    return markdown_table(["model", *summary_header(rows)], lines)


def limits_table(rows: Sequence[Row]) -> str:
    groups = grouped(rows, "model", "batch_size")
    lines = [[model, str(size), *summary_row(own)] for (model, size), own in groups.items()]
    return markdown_table(["model", "b", *summary_header(rows)], lines)


def headline(result: Result) -> str:
    packs = [pack for rows in _panels(result) if (pack := best_pack(rows)) is not None and pack["over"][TUNED]]
    if not packs:
        return ""
    best = max(packs, key=lambda pack: float(pack["over"][TUNED]["median"]))
    losing = [_name(pack) for pack in packs if pack["over"][TUNED]["median"] < 1]
    text = (
        f"The largest gain over one tuned model at a time is {spread_text(best['over'][TUNED])}, of {_name(best)} by "
        f"{best['side']} (n={best['n']})."
    )
    if not losing:
        return f"{text} Every best pack is faster than one tuned model at a time."
    return f"{text} Packing does not pay over one tuned model at a time for {'; '.join(losing)}."


def _panels(result: Result) -> list[list[Row]]:
    panels = []
    for own in grouped(result["rows"], "model", "batch_size").values():
        singles = [row for row in own if row["side"] in ONE_AT_A_TIME]
        packs = [row for row in own if row["side"] not in ONE_AT_A_TIME]
        panels += [[*singles, *of_size] for of_size in grouped(packs, "num_models").values()]
    return panels


def _name(row: Row) -> str:
    return f"{row['num_models']} {row['model']} with batches of {row['batch_size']}"


def result_text(result: Result) -> str:
    rows = result["rows"]
    table = {"families": families_table, "limits": limits_table}[result["part"]]
    parts = (headline(result), table(rows), cells_table(rows), how(result), left_out(rows))
    return "\n\n".join(part for part in parts if part)


TABLES = {"all": result_text}


if __name__ == "__main__":
    raise SystemExit(main())
