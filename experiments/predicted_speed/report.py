"""The prediction's bands, from the results file, and what was measured on such a GPU beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from experiments.bench.results import read_results
from experiments.tables.markdown import markdown_table

Result = Mapping[str, Any]
Row = Mapping[str, Any]
SIDES = ("fused", "streams", "plain")


def cells_of(result: Result) -> Iterator[tuple[Row, Row]]:
    """Every cell twice: by the slow assumptions, and by the fast ones."""
    by_cell: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        by_cell.setdefault(_cell(row), {})[row["assumed"]] = row
    for both in by_cell.values():
        yield both["slow"], both["fast"]


def _cell(row: Row) -> tuple[Any, ...]:
    return row["model"], row["precision"], row["gpu"], row["num_learners"]


def speed_text(result: Result) -> str:
    """Images/s with bands, what K learners gain over one, and over one plain model with all of their images."""
    ratios = {_cell(each): each for each in result["ratios"]}
    names = [name for name in result["ratios"][0] if "÷" in name]
    header = ["", "K", *(f"{side}, thousand images/s" for side in SIDES), *names]
    lines = [
        [
            f"{slow['model']} {slow['precision']} {slow['gpu']}",
            str(slow["num_learners"]),
            *(_band(thousands, slow[side]["images_per_s"], fast[side]["images_per_s"]) for side in SIDES),
            *(_band(ratio, *ratios[_cell(slow)][name]) for name in names),
        ]
        for slow, fast in cells_of(result)
    ]  # fmt: skip
    note = (
        f"Batches of {result['batch_size']} a learner; plain: one model with K times that, its step a CUDA graph. "
        "Speeds from the slow to the fast assumptions; ratios are the smallest and the largest over all mixtures of "
        "both. No figure was measured."
    )
    return f"{markdown_table(header, lines)}\n\n{note}"


def measured_text(results: Mapping[str, Result]) -> str:
    """What was measured on one of the GPUs, beside the prediction of the same cell."""
    cells = {_cell(slow): (slow, fast) for result in results.values() for slow, fast in cells_of(result)}
    sizes = {result["batch_size"] for result in results.values()}
    lines = []
    for machine, side, batch_size, cell, images_per_s in [*_of_throughput(), *_of_gpu(sizes)]:
        gpu = next((each[2] for each in cells if each[2] in " ".join(machine["gpus"])), None)
        model, precision, num_learners = cell
        # torch's convolutions multiply float32 as TF32, unless told otherwise.
        precision = "tf32" if precision == "fp32" else precision
        both = cells.get((model, precision, gpu, num_learners))
        if both is None or side not in SIDES or batch_size not in sizes:
            continue
        bounds = [each[side]["images_per_s"] for each in both]
        lines.append([
            f"{model} {precision} {gpu}, {side}", str(num_learners), thousands(images_per_s),
            _band(thousands, *bounds), ratio(images_per_s / math.sqrt(math.prod(bounds))),
        ])  # fmt: skip
    if not lines:
        return "Nothing of it has been measured yet."
    return markdown_table(
        ["", "K", "measured, thousand images/s", "predicted", "÷ middle of the band"],
        sorted(lines, key=lambda line: (line[0], int(line[1]))),
    )


Measured = tuple[Mapping[str, Any], str, int, tuple[str, str, int], float]


def _of_throughput() -> Iterator[Measured]:
    """Yield the rows of experiments/throughput: machine, side, batch size, (model, precision, K), images/s."""
    for result in read_results("throughput").values():
        for row in result["rows"]:
            own = {**result, **row}
            cell = own["model"], row["precision"], row["num_learners"]
            yield result["machine"], row["side"], own["batch_size"], cell, row["images_per_s"]


def _of_gpu(sizes: set[int]) -> Iterator[Measured]:
    """Yield the rows of experiments/gpu likewise; one tuned model of K batches in one is the plain model."""
    for result in read_results("gpu").values():
        for name, row in result["rows"].items():
            side, k, b, rule, *_ = name.split(":")
            if not row["images_per_s"] or (rule == "none") != (side == "tuned"):
                continue
            for size in sizes if side == "tuned" else ():
                cell = result["model"], row["precision"], int(b) // size
                yield result["machine"], "plain", size, cell, median(row["images_per_s"])
            cell = result["model"], row["precision"], int(k)
            yield result["machine"], side, int(b), cell, median(row["images_per_s"])


def _band(form: Callable[[float], str], *values: float) -> str:
    first, last = form(min(values)), form(max(values))
    return first if first == last else f"{first}–{last}"


def thousands(value: float) -> str:
    return f"{value / 1e3:,.3g}" if value < 1e5 else f"{value / 1e3:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"


TABLES = {"all": speed_text}
TABLES_OVER_ALL = {"measured": measured_text}
