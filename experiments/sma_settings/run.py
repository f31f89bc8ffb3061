"""Trains learners by Crossbow's SMA with one setting changed at a time, at equal samples, and writes results/GRID.json.

    python experiments/sma_settings/run.py digits_k4|digits_k8|lenet_k4|lenet_k8|resnet8_k4 [--cells PATTERN] [--jobs N]

README.md says what is compared. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.grids import report
from experiments.grids.grid import AS_RECORDED, CROSSBOW, RESNET8, RESNET_BY_SGD, Grid, cells
from experiments.grids.running import run_grid

DEFAULT = "α=1/K, μ=0.9, τ=1"
SETTINGS = {
    DEFAULT: CROSSBOW,
    "α=0.05": f"{CROSSBOW} averaging.correction_rate=0.05",
    "α=0.1": f"{CROSSBOW} averaging.correction_rate=0.1",
    "α=0.3": f"{CROSSBOW} averaging.correction_rate=0.3",  # with 8 learners 0.38 does not settle
    "α=0.1 growing to 0.9": f"{CROSSBOW} averaging.correction_rate=0.1 averaging.final_correction_rate=0.9",
    "α=1/K growing to 0.9": f"{CROSSBOW} averaging.final_correction_rate=0.9",
    "μ=0": f"{CROSSBOW} averaging.averaging_momentum=0",
    "μ=0.5": f"{CROSSBOW} averaging.averaging_momentum=0.5",
    "τ=2": f"{CROSSBOW} averaging.averaging_period=2",
    "τ=4": f"{CROSSBOW} averaging.averaging_period=4",
    "τ=10": f"{CROSSBOW} averaging.averaging_period=10",
    "rate as it is": f"{CROSSBOW} averaging.rate_scaling=none",
    "rate · K": f"{CROSSBOW} averaging.rate_scaling=linear",
    # The optimizer state of learners that go on from their mean: SMA itself never touches it but at a restart.
    "local_sgd, momentum kept": "averaging=local_sgd averaging.rate_scaling=sqrt averaging.learner_momentum=keep",
    "local_sgd, momentum reset": "averaging=local_sgd averaging.rate_scaling=sqrt averaging.learner_momentum=reset",
    "local_sgd, momentum averaged": (
        "averaging=local_sgd averaging.rate_scaling=sqrt averaging.learner_momentum=average"
    ),
}
# The rate drops to a tenth at half of the samples and again at three quarters; learners restart from z, or do not.
RESTARTS = {
    "steps, no restart": f"{CROSSBOW} averaging.restart_on_drop=false",
    "steps, restart, momentum reset": f"{CROSSBOW} averaging.restart_momentum=reset",
    "steps, restart, momentum kept": f"{CROSSBOW} averaging.restart_momentum=keep",
    "steps, restart, momentum averaged": f"{CROSSBOW} averaging.restart_momentum=average",
}
# What the average model is evaluated as, and the targets of the loss. A constant rate leaves an EMA noise to average.
SMOOTHED = {
    "EMA over 0.2 epochs": f"{CROSSBOW} averaging.average_ema=0.2",
    "label smoothing 0.1": f"{CROSSBOW} label_smoothing=0.1",
    "constant rate": f"{CROSSBOW} schedule=constant",
    "constant rate, EMA over 0.2 epochs": f"{CROSSBOW} schedule=constant averaging.average_ema=0.2",
}
NUM_LEARNERS = (4, 8)
DIGITS = f"+experiment=digits {AS_RECORDED} batch_size=16 max_epochs=20 executor=fused precision=fp32"
LENET = (
    f"+experiment=lenet {AS_RECORDED} optimizer.nesterov=false batch_size=32 max_epochs=2 executor=fused precision=fp32"
)


def grid(name: str, title: str, common: str, milestones: str, seeds: tuple[int, ...], target: float) -> Grid:
    steps = f"{common} schedule=multistep schedule.milestones=[{milestones}]"
    every = (*cells(common, {**SETTINGS, **SMOOTHED}), *cells(steps, RESTARTS))
    return Grid(name, title, every, seeds=seeds, targets=(target,), reference=DEFAULT)


# With the rate times K, for which its two momenta may be too much.
OF_RESNET8 = {
    DEFAULT: "",
    "μ=0": "averaging.averaging_momentum=0",
    "α=0.1": "averaging.correction_rate=0.1",
    "α=0.1, μ=0": "averaging.correction_rate=0.1 averaging.averaging_momentum=0",
    "α=1/K growing to 0.9": "averaging.final_correction_rate=0.9",
    "α=0.1 growing to 0.9, μ=0": (
        "averaging.correction_rate=0.1 averaging.final_correction_rate=0.9 averaging.averaging_momentum=0"
    ),
}
_RESNET8 = (
    f"{RESNET_BY_SGD} {RESNET8} {CROSSBOW} averaging.rate_scaling=linear {AS_RECORDED} num_learners=4 "
    "batch_size=32 max_epochs=5 precision=fp32"
)

GRIDS = {
    "resnet8_k4": Grid(
        "resnet8_k4", "ResNet-8 on CIFAR-10, 4 learners of 32 samples, 5 epochs, the rate times K",
        cells(_RESNET8, OF_RESNET8), seeds=(0, 1), targets=(0.7,), reference=DEFAULT,
    ),
} | {
    each.name: each
    for k in NUM_LEARNERS
    for each in (
        grid(f"digits_k{k}", f"MLP on the digits, {k} learners of 16 samples, 20 epochs",
             f"{DIGITS} num_learners={k}", "10,15", (0, 1, 2, 3, 4), 0.97),
        grid(f"lenet_k{k}", f"LeNet on MNIST, {k} learners of 32 samples, 2 epochs",
             f"{LENET} num_learners={k}", "1,1.5", (0, 1, 2), 0.99),
    )
}  # fmt: skip
TABLES = report.TABLES

main = partial(run_grid, "sma_settings", GRIDS)

if __name__ == "__main__":
    raise SystemExit(main())
