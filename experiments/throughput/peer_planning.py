"""Which cells of the peers are measured, and when. Pure.

With one K, whatever is faster or slower can be told for every peer: those cells come right after `auto`, and the same
learners eager in turn (`serial`) with them. The other K follow when the first cells of the other batch sizes have had
their turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crossbow_py.engine.modules.precision import PrecisionName
from experiments.throughput.peers import COMPILED
from experiments.throughput.planning import Cell, Cells, compared_learners, is_first, main_batch_size
from experiments.throughput.sides import Side


def with_peers(
    cells: Cells,
    batch_sizes: Sequence[int],
    num_learners: Sequence[int],
    peers: Sequence[str],
    precision: PrecisionName,
) -> Cells:
    """The same plan and the peers in it."""
    if not peers:
        return cells
    main, k = main_batch_size(batch_sizes), compared_learners(num_learners)
    theirs = peer_cells(batch_sizes, num_learners, peers, precision)
    first = [cell for cell in theirs if _is_first(cell, main, k)]
    in_turn = [cell for cell in cells.others if cell == Cell(main, Side("serial", k, "sma", precision))]
    ours = [cell for cell in cells.others if cell not in in_turn]
    return replace(
        cells,
        peers=[*first, *in_turn],
        others=[
            *(cell for cell in ours if is_first(cell.side)),
            *(cell for cell in theirs if cell not in first),
            *(cell for cell in ours if not is_first(cell.side)),
        ],
    )


def peer_cells(
    batch_sizes: Sequence[int], num_learners: Sequence[int], peers: Sequence[str], precision: PrecisionName
) -> list[Cell]:
    """`compiled` at every number of images a step that some (b, K) has, the others at the main batch size.

    Numbers of images that several (b, K) have are measured once. To the others, K = 1 is of no interest.
    """
    main, several = main_batch_size(batch_sizes), [k for k in num_learners if k > 1] or num_learners
    compiled: dict[int, Cell] = {}
    for batch_size in [main, *sorted(set(batch_sizes) - {main})]:
        for k in sorted({1, *num_learners}):
            compiled.setdefault(batch_size * k, Cell(batch_size, Side(COMPILED, k, "none", precision)))
    cells = list(compiled.values()) if COMPILED in peers else []
    return cells + [Cell(main, Side(name, k, "none", precision)) for name in peers if name != COMPILED for k in several]


def _is_first(cell: Cell, main: int, num_learners: int) -> bool:
    learners = (1, num_learners) if cell.side.side == COMPILED else (num_learners,)
    return cell.batch_size == main and cell.side.num_learners in learners
