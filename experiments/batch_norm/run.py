"""Trains learners once and evaluates their average model with every kind of BatchNorm statistics; writes results.

    python experiments/batch_norm/run.py resnet8 [--cells PATTERN] [--seeds 0,1,...] [--jobs N]

README.md says what is compared. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.grids.command import run_grid
from experiments.grids.grid import AS_RECORDED, RESNET8, Cell, Grid, cells

VARIANTS = "experiments.batch_norm.variants"
LEARNERS = {
    "sma, K=4": "averaging=sma num_learners=4",
    "sma, K=8": "averaging=sma num_learners=8",
    "local_sgd, K=4": "averaging=local_sgd averaging.rate_scaling=sqrt num_learners=4",
    "synchronous_sgd, linear, K=4": "averaging=synchronous_sgd_linear num_learners=4",
    "one learner": "averaging=sma num_learners=1",
    "one learner, b=8": "averaging=sma num_learners=1 batch_size=8 optimizer.learning_rate=0.025",
    "sma, K=4, b=8": "averaging=sma num_learners=4 batch_size=8 optimizer.learning_rate=0.025",
}


def measured(common: str, parts: int) -> tuple[Cell, ...]:
    """A cell for every kind of learners, evaluated so many times an epoch."""
    return tuple(replace(cell, program=VARIANTS) for cell in cells(common, LEARNERS, parts))


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("resnet8", "ResNet-8 on CIFAR-10, 2 epochs",
             measured(f"+experiment=resnet32_short {RESNET8} batch_size=32 max_epochs=2 precision=fp32 "
                      f"checkpoint_every_s=120 {AS_RECORDED}", parts=2),
             seeds=(0, 1)),
    )
}  # fmt: skip

main = partial(run_grid, "batch_norm", GRIDS)

if __name__ == "__main__":
    raise SystemExit(main())
