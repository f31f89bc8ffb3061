"""A suite's results: from measured cells to the rows of its file, and from the file to tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from experiments.bench.sides.side import AUTO, EXECUTOR_SIDES, OPEN, SINGLE_SIDES
from experiments.bench.windows import dropped_windows, paired_ratios
from experiments.tables.markdown import NONE, markdown_table
from experiments.throughput.comparison import Measurement, ratios, to_row
from experiments.throughput.planning import MAIN_BATCH_SIZE, Cell, LeftOut

KIND = "suite"
Row = Mapping[str, Any]
Result = Mapping[str, Any]

_SIDES = (*SINGLE_SIDES, *EXECUTOR_SIDES, AUTO)
_CAUSES = {
    "round": "as one round would take longer than {max_round_s:g} s",
    "time": "for want of time ({minutes:g} minutes for all models)",
}


def rows_of(model: str, measurements: Mapping[Cell, Measurement]) -> list[dict[str, Any]]:
    def place(cell: Cell) -> tuple[int, int, int]:
        return cell.batch_size, _SIDES.index(cell.side.side), cell.side.num_learners

    return [to_row(measurements[cell], model, cell.batch_size) for cell in sorted(measurements, key=place)]


def ratios_of(model: str, measurements: Mapping[Cell, Measurement]) -> list[dict[str, Any]]:
    """Every cell to the single-model sides at its batch size; medians of the ratios within passes."""
    entries = []
    for batch_size in sorted({cell.batch_size for cell in measurements}):
        same = [found for cell, found in measurements.items() if cell.batch_size == batch_size]
        entries += [{"model": model, "batch_size": batch_size, **entry} for entry in ratios(same)]
    return entries


def left_out_of(model: str, left_out: Mapping[Cell, LeftOut]) -> list[dict[str, Any]]:
    """An entry a cell; K of the auto side is not known when it fails."""
    return [
        {
            "model": model,
            "batch_size": cell.batch_size,
            "side": cell.side.side,
            "num_learners": None if cell.side.num_learners == OPEN else cell.side.num_learners,
            **asdict(why),
        }
        for cell, why in left_out.items()
    ]


def auto_of(model: str, measurements: Mapping[Cell, Measurement]) -> list[dict[str, Any]]:
    """An entry a model: what the auto side chose, how long that took, its ratio to the best cell of its batch size."""
    rows, entries = rows_of(model, measurements), []
    for cell, measurement in measurements.items():
        choice = measurement.ready.choice
        if choice is None:
            continue
        best = best_row(rows, batch_size=cell.batch_size, sides=EXECUTOR_SIDES)
        row = to_row(measurement, model, cell.batch_size)
        values = paired_ratios(row["images_per_s_windows"], best["images_per_s_windows"]) if best else []
        entries.append({
            "model": model,
            "batch_size": cell.batch_size,
            **asdict(choice),
            "tuning_s": round(choice.tuning_s, 2),
            "images_per_s": row["images_per_s"],
            "n": row["n"],
            "best": best and {key: best[key] for key in ("side", "num_learners", "images_per_s")},
            "ratio_to_best": round(median(values), 4) if values else None,
        })  # fmt: skip
    return entries


def best_row(rows: Iterable[Row], *, batch_size: int, sides: Sequence[str]) -> Row | None:
    """The fastest cell of some sides at a batch size; None when none was measured."""
    measured = [row for row in rows if row["batch_size"] == batch_size and row["side"] in sides and row["n"]]
    return max(measured, key=lambda row: float(row["images_per_s"]), default=None)


def result_text(result: Result) -> str:
    parts = [summary_table(result)]
    for model in models(result):
        parts += [f"**{model}**, {result['data'][model]} images", best_table(result, model)]
        parts += left_out(result, model)
    return "\n\n".join(part for part in [*parts, notes(result)] if part)


def summary_table(result: Result) -> str:
    header = ["model", "default_loop", "tuned_single", "fastest cell", "images/s", "÷ tuned_single", "auto", "images/s",
              "÷ fastest", "tuning, s"]  # fmt: skip
    batch_size, rows = main_batch_size(result), []
    for model in models(result):
        own = rows_of_model(result, model)
        best = best_row(own, batch_size=batch_size, sides=EXECUTOR_SIDES)
        auto = next((entry for entry in result["auto"] if entry["model"] == model), None)
        rows.append([
            model,
            *(_rate(best_row(own, batch_size=batch_size, sides=[side])) for side in SINGLE_SIDES),
            f"{best['side']} K={best['num_learners']}" if best else NONE,
            _rate(best),
            ratio_text(result, best, "tuned_single") if best else NONE,
            *_auto_cells(auto),
        ])  # fmt: skip
    return markdown_table(header, rows)


def _auto_cells(auto: Mapping[str, Any] | None) -> list[str]:
    if auto is None:
        return [NONE] * 4
    ratio, unsettled = auto["ratio_to_best"], "" if auto["settled"] else " (not settled)"
    return [
        f"{auto['executor']} K={auto['num_learners']}{unsettled}",
        _rate(auto),
        NONE if ratio is None else f"{ratio:.2f}",
        f"{auto['tuning_s']:.0f}",
    ]


def best_table(result: Result, model: str) -> str:
    header = ["side", "b", "K", "images/s", "÷ tuned_single", "÷ default_loop", "n"]
    rows, own = [], rows_of_model(result, model)
    for batch_size in batch_sizes(result):
        for side in _SIDES:
            row = best_row(own, batch_size=batch_size, sides=[side])
            if row is not None:
                base = (ratio_text(result, row, name) for name in ("tuned_single", "default_loop"))
                rows.append([side, str(batch_size), str(row["num_learners"]), _rate(row), *base, str(row["n"])])
    return markdown_table(header, rows)


def left_out(result: Result, model: str) -> list[str]:
    """Sentences on the cells of a model that were not measured, or of which no window was clean."""
    entries = [entry for entry in result["left_out"] if entry["model"] == model]
    sentences = []
    for cause, words in _CAUSES.items():
        cells = _cells(entry for entry in entries if entry["cause"] == cause)
        if cells:
            sentences.append(f"Left out, {words.format(**result['method'])}: {cells}.")
    for reason in dict.fromkeys(entry["reason"] for entry in entries if entry["cause"] == "failure"):
        cells = _cells(entry for entry in entries if entry["reason"] == reason)
        sentences.append(f"Left out, as it failed: {cells} ({reason})")
    if unclean := _cells(row for row in rows_of_model(result, model) if not row["n"]):
        sentences.append(f"Others were busy in every window: {unclean}.")
    return sentences


def _cells(entries: Iterable[Mapping[str, Any]]) -> str:
    learners: dict[str, list[int]] = {}
    for entry in entries:
        counts = learners.setdefault(f"{entry['side']} b={entry['batch_size']}", [])
        if entry["num_learners"] is not None and entry["side"] not in SINGLE_SIDES:
            counts.append(entry["num_learners"])
    return "; ".join(
        name + (f" K={', '.join(map(str, sorted(counts)))}" if counts else "") for name, counts in learners.items()
    )


def notes(result: Result) -> str:
    method = result["method"]
    text = (
        f"{result['device']}, {result['precision']} (default_loop fp32), medians of n windows of "
        f"{method['window_s']:g} s and at least a round, in {method['passes']} passes over all cells of a model; "
        f"ratios are medians over passes; all of it took {method['took_s']:.0f} s"
    )
    return f"{text}; {dropped_windows(method, then='dropped')}"


def models(result: Result) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in result["rows"]))


def batch_sizes(result: Result) -> list[int]:
    return sorted({row["batch_size"] for row in result["rows"]})


def main_batch_size(result: Result) -> int:
    """The one that the summary and the picture over K are for."""
    measured = batch_sizes(result)
    return MAIN_BATCH_SIZE if MAIN_BATCH_SIZE in measured else min(measured)


def rows_of_model(result: Result, model: str) -> Sequence[Row]:
    return [row for row in result["rows"] if row["model"] == model]


def ratio_text(result: Result, row: Row, base: str) -> str:
    """The ratio of throughputs of a row to a side of one model, as a cell of a table."""
    keys = ("model", "batch_size", "side", "num_learners", "averaging", "precision")
    for entry in result["ratios"]:
        same = all(entry[key] == row[key] for key in keys if key in entry)
        if entry["kind"] == "throughput" and same and entry["to"]["side"] == base:
            return f"{entry['ratio']:.2f}"
    return "1" if row["side"] == base else NONE


def _rate(row: Mapping[str, Any] | None) -> str:
    return NONE if row is None or row["images_per_s"] is None else f"{row['images_per_s']:,.0f}"
