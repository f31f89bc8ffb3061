"""Trains one model with batches of 8 to 1024 samples to a target accuracy, and learners with as many together.

    python experiments/batch_size/run.py digits|lenet [--cells PATTERN] [--seeds 0,1,...] [--jobs N]

Writes results/GRID.json; README.md says what is compared. A cell that is done is not run again.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.grids.command import run_grid
from experiments.grids.grid import Cell, Grid, merged

ONE, LEARNERS = "one model", "learners of 32"
BATCH_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
LEARNER_BATCH = 32
# Times the recipe's rate, scaled linearly with the batch size of a model and with √K; the best of them is reported.
FACTORS = (0.5, 1.0, 2.0)


def cells_of(common: str, recipe_rate: float, recipe_batch: int, parts: int = 1) -> tuple[Cell, ...]:
    """One model for every batch size, and learners of 32 with as many samples a round, each at every rate."""
    found = []
    for side in (ONE, LEARNERS):
        for total in (size for size in BATCH_SIZES if side == ONE or size > LEARNER_BATCH):
            batch = total if side == ONE else LEARNER_BATCH
            num_learners = total // batch
            for factor in FACTORS:
                rate = recipe_rate * batch / recipe_batch * math.sqrt(num_learners) * factor
                words = (f"batch_size={batch}", f"num_learners={num_learners}", f"optimizer.learning_rate={rate:.6g}")
                found.append(
                    Cell(
                        name=f"{side}, {total} a round, rate {rate:.4g}",
                        overrides=merged(common.split(), words),
                        labels={"side": side, "total": total, "rate": rate},
                        parts=parts,
                    )
                )
    return tuple(found)


GRIDS = {
    grid.name: grid
    for grid in (
        Grid(
            "digits",
            "MLP on the digits to 97 %",
            cells_of("+experiment=digits label_smoothing=0 schedule=constant max_epochs=60 target_accuracy=0.97 "
                     "averaging=sma averaging.rate_scaling=none executor=fused precision=fp32", 0.05, 16, parts=2),
            seeds=(0, 1, 2, 3, 4), targets=(0.97,),
        ),
        Grid(
            "lenet",
            "LeNet on MNIST to 99 %",
            cells_of("+experiment=lenet label_smoothing=0 optimizer.nesterov=false schedule=constant max_epochs=10 "
                     "target_accuracy=0.99 averaging=sma averaging.rate_scaling=none executor=fused precision=fp32",
                     0.03, 32, parts=4),
            targets=(0.99,),
        ),
    )
}  # fmt: skip

main = partial(run_grid, "batch_size", GRIDS)

if __name__ == "__main__":
    raise SystemExit(main())
