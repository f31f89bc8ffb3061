"""Tables of many models at once over batch sizes, built from a results object."""

from __future__ import annotations

from experiments.bench.packs.report import (
    Result,
    bases_of,
    best_pack,
    cells_table,
    grouped,
    how,
    left_out,
    summary_header,
    summary_row,
)
from experiments.tables.markdown import markdown_table, spread_text


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
    """A row a batch size: the sides of one model at a time, and the best pack."""
    groups = grouped(result["rows"], "batch_size")
    lines = [[str(size), *summary_row(rows)] for (size,), rows in groups.items()]
    return markdown_table(["b", *summary_header(result["rows"])], lines)


def result_text(result: Result) -> str:
    rows = result["rows"]
    parts = (headline(result), summary_table(result), cells_table(rows), how(result), left_out(rows))
    return "\n\n".join(part for part in parts if part)


TABLES = {"all": result_text}
