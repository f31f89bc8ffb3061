"""Trains learners by several rules while their learning is measured, and writes results/GRID.json.

    python experiments/gradient_noise/run.py lenet|resnet8 [--cells PATTERN] [--seeds 0,1,...] [--jobs N]

README.md says what is measured. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.grids.command import run_grid
from experiments.grids.grid import AS_RECORDED, RESNET8, Grid, cells

ONE = "one learner"
_MEASURED = f"{AS_RECORDED} batch_size=32 precision=fp32 learning_statistics=true"
_RULES = {
    ONE: "num_learners=1",
    "sma": "averaging=sma num_learners=4",
    "local_sgd": "averaging=local_sgd averaging.rate_scaling=sqrt num_learners=4",
}

GRIDS = {
    grid.name: grid
    for grid in (
        Grid("lenet", "LeNet on MNIST, learners of 32 samples",
             cells(f"+experiment=lenet executor=fused max_epochs=2 {_MEASURED}",
                   {**_RULES, "synchronous_sgd, sqrt": "averaging=synchronous_sgd_sqrt num_learners=4"}, parts=4),
             reference=ONE),
        Grid("resnet8", "ResNet-8 on CIFAR-10, learners of 32 samples",
             cells(f"+experiment=resnet32_short {RESNET8} max_epochs=5 checkpoint_every_s=120 {_MEASURED}",
                   {**_RULES, "synchronous_sgd, linear": "averaging=synchronous_sgd_linear num_learners=4"}, parts=2),
             seeds=(0, 1), reference=ONE),
    )
}  # fmt: skip

main = partial(run_grid, "gradient_noise", GRIDS)

if __name__ == "__main__":
    raise SystemExit(main())
