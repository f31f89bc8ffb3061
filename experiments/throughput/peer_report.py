"""The peers' part of a suite's results: what learners are compared with, and the table of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.common.markdown import NONE, markdown_table
from experiments.throughput.comparison import Measurement
from experiments.throughput.peers import COMPILED, JAX_VMAP, MPS, PEER_SIDES, VMAP
from experiments.throughput.planning import Cell
from experiments.throughput.sides import EXECUTOR_SIDES

Row = Mapping[str, Any]


def with_equal_batches(measurements: Mapping[Cell, Measurement], batch_size: int) -> list[Measurement]:
    """The measurements at a batch size, and `compiled` ones of other batch sizes as what they are at this one.

    One model on 64 images a step is as good a peer of two learners with batch size 32 as of four with 16.
    """
    same = {cell.side: found for cell, found in measurements.items() if cell.batch_size == batch_size}
    for cell, found in measurements.items():
        num_learners, rest = divmod(cell.images_per_round, batch_size)
        if cell.side.side == COMPILED and num_learners and not rest:
            side = replace(cell.side, num_learners=num_learners)
            same.setdefault(side, replace(found, side=side))
    return list(same.values())


def peers_table(rows: Sequence[Row], ratios: Sequence[Row], batch_size: int) -> str:
    """A row for every K at a batch size: its fastest executor, and how many times as fast as each peer that is.

    Empty without peers.
    """
    if not any(row["side"] in PEER_SIDES for row in rows):
        return ""
    header = ["K", "fastest executor", "images/s", "÷ compiled b", "÷ compiled K·b", "÷ serial", "÷ vmap", "÷ jax_vmap",
              "÷ mps_processes"]  # fmt: skip
    ours = [row for row in rows if row["batch_size"] == batch_size and row["side"] in EXECUTOR_SIDES and row["n"]]
    lines = []
    for k in sorted({row["num_learners"] for row in ours}):
        best = max((row for row in ours if row["num_learners"] == k), key=lambda row: float(row["images_per_s"]))
        bases = [(COMPILED, 1), (COMPILED, k), *((name, k) for name in ("serial", VMAP, JAX_VMAP, MPS))]
        cells = [_ratio(ratios, best, *base) for base in bases]
        lines.append([str(k), best["side"], f"{best['images_per_s']:,.0f}", *cells])
    return markdown_table(header, lines)


def _ratio(ratios: Sequence[Row], row: Row, base: str, num_learners: int) -> str:
    keys = ("model", "batch_size", "side", "num_learners", "precision")
    same = (entry for entry in ratios if all(entry[key] == row[key] for key in keys))
    for entry in same:
        to = entry["to"]
        if entry["kind"] == "throughput" and (to["side"], to["num_learners"]) == (base, num_learners):
            return f"{entry['ratio']:.2f}"
    return NONE


def absent(result: Mapping[str, Any]) -> str:
    """A sentence on peers that this machine could not have; results without peers have no such entry."""
    reasons = result.get("peers", {}).get("absent", {})
    return f"Not measured: {'; '.join(f'{name}, as {reason}' for name, reason in reasons.items())}." if reasons else ""
