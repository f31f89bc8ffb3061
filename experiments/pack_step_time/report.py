"""Tables of packs' step time, built from a results object.

A pack of K models that gives r times the images/s of one model at a time takes a step in 1/r of the time that K steps
one after another take: gains in step time are ratios of images/s.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from experiments.bench.packs.side import DEFAULT, ONE_AT_A_TIME, TUNED
from experiments.tables.markdown import NONE, markdown_table, spread_text


def families_table(rows: Sequence[Row]) -> str:
    """A row a family and number of models: the best pack of that size, and its gain in step time."""
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


def mixed_table(rows: Sequence[Row]) -> str:
    """A row a pair of families and executor: by how much faster both families' work is done side by side."""
    header = ["families", "executor", "K", "images/s of each", "÷ default_loop", "÷ tuned_single",
              "÷ two packs in turn", "n", "dropped"]  # fmt: skip
    lines = [
        [
            " and ".join(row["models"]),
            row["side"],
            str(row["num_models"]),
            " and ".join(NONE if rate is None else f"{rate:,.0f}" for rate in row["images_per_s"]),
            *(spread_text(row["gain"][base]) for base in (DEFAULT, TUNED, "in_turn")),
            str(row["n"]),
            str(row["dropped"]),
        ]
        for row in rows
    ]
    return markdown_table(header, lines) if lines else ""


def headline(result: Result) -> str:
    if result["part"] == "mixed":
        return _mixed_headline(result["mixed"])
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


def _mixed_headline(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["gain"]["in_turn"]]
    if not found:
        return ""
    best = max(found, key=lambda row: float(row["gain"]["in_turn"]["median"]))
    paying = sum(row["gain"]["in_turn"]["median"] > 1 for row in found)
    return (
        f"Two packs side by side do their work faster than in turn in {paying} of {len(found)} cases, at best "
        f"{spread_text(best['gain']['in_turn'])} times ({' and '.join(best['models'])} by {best['side']}, "
        f"n={best['n']})."
    )


def _panels(result: Result) -> list[list[Row]]:
    """Rows in which packs are compared: of a model, batch size and number of models."""
    panels = []
    for own in grouped(result["rows"], "model", "batch_size").values():
        singles = [row for row in own if row["side"] in ONE_AT_A_TIME]
        packs = [row for row in own if row["side"] not in ONE_AT_A_TIME]
        panels += [[*singles, *of_size] for of_size in grouped(packs, "num_models").values()]
    return panels


def _name(row: Row) -> str:
    return f"{row['num_models']} {row['model']} with batches of {row['batch_size']}"


def result_text(result: Result) -> str:
    rows, mixed = result["rows"], result["mixed"]
    table = {"families": families_table(rows), "limits": limits_table(rows), "mixed": mixed_table(mixed)}
    parts = (headline(result), table[result["part"]], cells_table(rows), how(result), left_out([*rows, *mixed]))
    return "\n\n".join(part for part in parts if part)


TABLES = {"all": result_text}
