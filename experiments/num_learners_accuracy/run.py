"""Trains by a recipe with 1, 2, 4 and 8 learners and no other key changed, and writes results/GRID.json.

    python experiments/num_learners_accuracy/run.py digits|lenet [--cells PATTERN] [--seeds 0,1,...]

README.md says what is compared. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.grids import report
from experiments.grids.grid import Cell, Grid, cells
from experiments.grids.running import run_grid

NUM_LEARNERS = (1, 2, 4, 8)
# The recipe of the digits is SMA, that of LeNet synchronous_sgd, both with the learning rate times √K. Other sides are
# without label smoothing, which the recipes have since it was compared here.
SIDES = {
    "digits": {
        "recipe": "",
        "hard targets": "label_smoothing=0",
        "gradients averaged": "label_smoothing=0 averaging=synchronous_sgd_linear",
    },
    "lenet": {
        "recipe": "",
        "hard targets": "label_smoothing=0",
        "rate · K": "label_smoothing=0 averaging=synchronous_sgd_linear",
        "models averaged": "label_smoothing=0 averaging=sma",
    },
}
REFERENCE = "recipe, K=1"


def of_sides(grid: str, common: str, parts: int = 1) -> tuple[Cell, ...]:
    found = cells(common, {f"{side}, K={k}": f"{words} num_learners={k}"
                           for side, words in SIDES[grid].items() for k in NUM_LEARNERS}, parts)  # fmt: skip
    pairs = [(side, k) for side in SIDES[grid] for k in NUM_LEARNERS]
    return tuple(
        replace(cell, labels={"side": side, "num_learners": k}) for cell, (side, k) in zip(found, pairs, strict=True)
    )


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("digits", "MLP on the digits, learners of 16 samples",
             of_sides("digits", "+experiment=digits max_epochs=20"),
             seeds=(0, 1, 2, 3, 4), targets=(0.97,), reference=REFERENCE, alone=True),
        Grid("lenet", "LeNet on MNIST, learners of 32 samples",
             of_sides("lenet", "+experiment=lenet max_epochs=3", parts=4),
             targets=(0.99,), reference=REFERENCE, alone=True),
    )
}  # fmt: skip
TABLES = report.TABLES

main = partial(run_grid, "num_learners_accuracy", GRIDS)

if __name__ == "__main__":
    raise SystemExit(main())
