"""Trains with the number of learners that the auto-tuner finds and with fixed ones, and writes results/GRID.json.

    python experiments/tuner_accuracy/run.py digits|lenet [--cells PATTERN] [--seeds 0,1,...]

README.md says what is compared. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.grids import report
from experiments.grids.grid import Grid, cells
from experiments.grids.running import run_grid

AUTO = "auto, goodput"
_AUTO = "num_learners=auto max_learners=8 auto_tuner.objective="
LEARNERS = {
    "K=1": "num_learners=1",
    AUTO: f"{_AUTO}goodput",
    "auto, throughput": f"{_AUTO}throughput",
    **{f"K={k}": f"num_learners={k}" for k in (2, 4, 8)},
}
# Long enough for the tuner, which takes 7 to 17 seconds on two cores.
GRIDS = {
    grid.name: grid
    for grid in (
        Grid("digits", "MLP on the digits, learners of 16 samples, 400 epochs",
             cells("+experiment=digits label_smoothing=0 max_epochs=400 checkpoint_every_epochs=100 precision=fp32",
                   LEARNERS),
             seeds=(0, 1, 2, 3, 4), targets=(0.97,), reference=AUTO, alone=True),
        Grid("lenet", "LeNet on MNIST, learners of 32 samples, 6 epochs",
             cells("+experiment=lenet label_smoothing=0 max_epochs=6 precision=fp32", LEARNERS),
             targets=(0.99,), reference=AUTO, alone=True),
    )
}  # fmt: skip
TABLES = report.TABLES

main = partial(run_grid, "tuner_accuracy", GRIDS)

if __name__ == "__main__":
    raise SystemExit(main())
