"""Trains four learners by every averaging rule at equal samples, and one learner, and writes results/GRID.json.

    python experiments/averaging_rules/run.py GRID [--cells PATTERN] [--jobs N]

README.md says what is compared. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.grids import report as grids_report
from experiments.grids.grid import AS_RECORDED, CROSSBOW, RESNET8, RESNET_BY_SGD, Grid, cells
from experiments.grids.report import Result, Run, by_cell, difference, has_diverged
from experiments.grids.running import run_grid
from experiments.tables.markdown import NONE, markdown_table

_OF_FOUR = ", K=4"  # in the names of a grid that has other numbers of learners too
_DATA = {
    "digits": "MLP, digits",
    "lenet": "LeNet, MNIST",
    "cifar10": "LeNet, CIFAR-10",
    "resnet8": "ResNet-8, CIFAR-10",
    "resnet32": "ResNet-32, CIFAR-10",
}
ONE = "one learner"
RULES = {
    ONE: "num_learners=1",
    "sma, unscaled": "averaging=sma averaging.rate_scaling=none",
    "sma, sqrt": "averaging=sma averaging.rate_scaling=sqrt",
    "sma, linear": "averaging=sma averaging.rate_scaling=linear",
    "crossbow, α=1/K, unscaled": f"{CROSSBOW} averaging.rate_scaling=none",
    "crossbow, α=1/K, sqrt": f"{CROSSBOW} averaging.rate_scaling=sqrt",
    "crossbow, α=1/K, linear": f"{CROSSBOW} averaging.rate_scaling=linear",
    "elastic, unscaled": "averaging=elastic",
    "elastic, linear": "averaging=elastic averaging.rate_scaling=linear",
    "local_sgd, unscaled": "averaging=local_sgd",
    "local_sgd, linear": "averaging=local_sgd averaging.rate_scaling=linear",
    "diloco, unscaled": "averaging=diloco",
    "diloco, linear": "averaging=diloco averaging.rate_scaling=linear",
    "slowmo, unscaled": "averaging=slowmo",
    "slowmo, linear": "averaging=slowmo averaging.rate_scaling=linear",
    "papa, unscaled": "averaging=papa",
    "papa, linear": "averaging=papa averaging.rate_scaling=linear",
    "grouped_sma of 2, linear": "averaging=grouped_sma averaging.group_size=2 averaging.rate_scaling=linear",
    "synchronous_sgd, unscaled": "averaging=synchronous_sgd",
    "synchronous_sgd, sqrt": "averaging=synchronous_sgd averaging.rate_scaling=sqrt",
    "synchronous_sgd, linear": "averaging=synchronous_sgd averaging.rate_scaling=linear",
}
NESTEROV = {
    "one learner, Nesterov": "num_learners=1 optimizer.nesterov=true",
    "synchronous_sgd, linear, Nesterov": (
        "averaging=synchronous_sgd averaging.rate_scaling=linear optimizer.nesterov=true"
    ),
}
# There are but 470 rounds.
OF_DIGITS = {
    "diloco, unscaled": "averaging=diloco averaging.averaging_period=10",
    "diloco, linear": "averaging=diloco averaging.averaging_period=10 averaging.rate_scaling=linear",
}
# Hours of training each, so that only the ends are there: averaged models, averaged gradients, and both.
OF_RESNET32 = {
    ONE: "num_learners=1",
    "crossbow, α=1/K, unscaled, K=4": f"{CROSSBOW} averaging.rate_scaling=none num_learners=4",
    "crossbow, α=1/K, linear, K=4": f"{CROSSBOW} averaging.rate_scaling=linear num_learners=4",
    "sma, linear, K=4": "averaging=sma averaging.rate_scaling=linear num_learners=4",
    "synchronous_sgd, linear, K=4": "averaging=synchronous_sgd averaging.rate_scaling=linear num_learners=4",
    "sma, linear, K=16": "averaging=sma averaging.rate_scaling=linear num_learners=16",
    "grouped_sma of 4, linear, K=16": (
        "averaging=grouped_sma averaging.group_size=4 averaging.rate_scaling=linear num_learners=16"
    ),
    "synchronous_sgd, linear, K=16": "averaging=synchronous_sgd averaging.rate_scaling=linear num_learners=16",
}
# Beyond the batches that averaged gradients can make use of, if anywhere, models averaged between groups should win.
OF_MANY = {
    ONE: "num_learners=1",
    "crossbow, α=1/K, unscaled": f"{CROSSBOW} averaging.rate_scaling=none",
    "crossbow, α=1/K, sqrt": f"{CROSSBOW} averaging.rate_scaling=sqrt",
    "crossbow, α=1/K, linear": f"{CROSSBOW} averaging.rate_scaling=linear",
    "sma, unscaled": "averaging=sma averaging.rate_scaling=none",
    "sma, sqrt": "averaging=sma averaging.rate_scaling=sqrt",
    "sma, linear": "averaging=sma averaging.rate_scaling=linear",
    "grouped_sma of 4, sqrt": "averaging=grouped_sma averaging.group_size=4 averaging.rate_scaling=sqrt",
    "grouped_sma of 4, linear": "averaging=grouped_sma averaging.group_size=4 averaging.rate_scaling=linear",
    "synchronous_sgd, unscaled": "averaging=synchronous_sgd",
    "synchronous_sgd, sqrt": "averaging=synchronous_sgd averaging.rate_scaling=sqrt",
    "synchronous_sgd, linear": "averaging=synchronous_sgd averaging.rate_scaling=linear",
}
# By Crossbow's own schedule: flat, then drops. What comes before the first drop is the doing of z, or of its EMA.
OF_STEPS = {
    ONE: "num_learners=1",
    "crossbow": "averaging=crossbow",
    "crossbow, α=1/K, linear": f"{CROSSBOW} averaging.rate_scaling=linear",
    "sma, linear": "averaging=sma averaging.rate_scaling=linear",
    "synchronous_sgd, linear": "averaging=synchronous_sgd averaging.rate_scaling=linear",
}
OF_LONG_RUNS = {name: RULES[name] for name in (ONE, "sma, linear", "synchronous_sgd, linear")}
# One learner is tuned: of 0.01, 0.03 and 0.1 the first is best.
_CIFAR10_LENET = (
    f"+experiment=lenet data=cifar10 averaging=sma {AS_RECORDED} optimizer.nesterov=false optimizer.learning_rate=0.01 "
    "optimizer.weight_decay=5e-4 schedule.warmup_epochs=0.5 batch_size=32 max_epochs=5 executor=fused precision=fp32"
)
# The recipe's optimizer has Nesterov momentum already.
_CIFAR10 = (
    f"{RESNET_BY_SGD} averaging=sma {AS_RECORDED} batch_size=32 max_epochs=5 precision=fp32 "
    "checkpoint_every_s=120"
)
_CIFAR10_RESNET8 = f"{_CIFAR10} {RESNET8}"
GRIDS = {
    grid.name: grid
    for grid in (
        Grid(
            "digits",
            "MLP on the digits, learners of 16 samples, 20 epochs",
            cells(f"+experiment=digits {AS_RECORDED} num_learners=4 batch_size=16 max_epochs=20 executor=fused "
                  "precision=fp32",
                  {**RULES, **NESTEROV, **OF_DIGITS}),
            seeds=(0, 1, 2, 3, 4), targets=(0.97,), reference=ONE,
        ),
        Grid(
            "lenet",
            "LeNet on MNIST, learners of 32 samples, 2 epochs",
            cells(f"+experiment=lenet averaging=sma {AS_RECORDED} optimizer.nesterov=false num_learners=4 "
                  "batch_size=32 max_epochs=2 executor=fused precision=fp32",
                  {**RULES, **NESTEROV}, parts=4),
            targets=(0.99,), reference=ONE,
        ),
        Grid(
            "cifar10",
            "LeNet on CIFAR-10, learners of 32 samples, 5 epochs",
            cells(f"{_CIFAR10_LENET} num_learners=4", RULES),
            targets=(0.7,), reference=ONE,
        ),
        Grid(
            "cifar10_k16",
            "LeNet on CIFAR-10, 16 learners of 32 samples, 5 epochs",
            cells(f"{_CIFAR10_LENET} num_learners=16", OF_MANY),
            targets=(0.7,), reference=ONE,
        ),
        Grid(
            "cifar10_b1024",
            "LeNet on CIFAR-10, 8 learners of 128 samples, 1,024 together, 15 epochs",
            cells(f"{_CIFAR10_LENET} num_learners=8 batch_size=128 max_epochs=15", OF_MANY),
            seeds=(0, 1), targets=(0.7,), reference=ONE,
        ),
        Grid(
            "cifar10_steps",
            "LeNet on CIFAR-10, 4 learners of 32 samples, 5 epochs, rate ×0.1 after 3 and after 4",
            cells(f"{_CIFAR10_LENET} num_learners=4 schedule=multistep schedule.milestones=[3,4] "
                  "schedule.warmup_epochs=0.5 averaging.average_ema=0.2", OF_STEPS, parts=2),
            targets=(0.68,), reference=ONE, shown_after=(3.0,),
        ),
        Grid(
            "cifar10_long",
            "LeNet on CIFAR-10, 4 learners of 32 samples, 30 epochs",
            cells(f"{_CIFAR10_LENET} num_learners=4 max_epochs=30", OF_LONG_RUNS),
            seeds=(0, 1), targets=(0.75,), reference=ONE,
        ),
        Grid(
            "resnet8",
            "ResNet-8 on CIFAR-10, learners of 32 samples, 5 epochs",
            cells(f"{_CIFAR10_RESNET8} num_learners=4", RULES),
            targets=(0.7,), reference=ONE,
        ),
        Grid(
            "resnet8_k16",
            "ResNet-8 on CIFAR-10, 16 learners of 32 samples, 5 epochs",
            cells(f"{_CIFAR10_RESNET8} num_learners=16", OF_MANY),
            seeds=(0, 1), targets=(0.7,), reference=ONE,
        ),
        Grid(
            "resnet32",
            "ResNet-32 on CIFAR-10, learners of 32 samples, 5 epochs",
            cells(_CIFAR10, OF_RESNET32),
            seeds=(0, 1), targets=(0.8,), reference=ONE,
        ),
        Grid(
            "resnet32_long",
            "ResNet-32 on CIFAR-10, 4 learners of 32 samples, 30 epochs",
            cells(f"{_CIFAR10} num_learners=4 max_epochs=30 precision=bf16", OF_LONG_RUNS),
            seeds=(0,), targets=(0.88, 0.9), reference=ONE,
        ),
    )
}  # fmt: skip


def differences_table(results: Mapping[str, Result]) -> str:
    """A row a rule: test accuracy of four learners less that of one at equal samples, in percentage points.

    Where runs broke, with a loss that was not finite or less than half of one learner's accuracy, it is said how many.
    """
    runs = {
        grid: {name.removesuffix(_OF_FOUR): runs for name, runs in by_cell(results[grid]).items()}
        for grid in _DATA
        if grid in results
    }
    header = ["four learners − one, percentage points", *(_header(_DATA[grid], own) for grid, own in runs.items())]
    rows = [
        [rule, *(_points(own[rule], own[ONE]) if rule in own else NONE for own in runs.values())]
        for rule in RULES
        if rule != ONE and any(rule in own for own in runs.values())
    ]
    return markdown_table(header, rows)


def _header(data: str, own: Mapping[str, Sequence[Run]]) -> str:
    counts = sorted({len(runs) for runs in own.values()})
    return f"{data} (n = {'–'.join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))})"


def _points(own: Sequence[Run], one: Sequence[Run]) -> str:
    least = 0.5 * min((run["summary"]["test_accuracy"] for run in one if not has_diverged(run)), default=0.0)
    broken = sum(has_diverged(run) or run["summary"]["test_accuracy"] < least for run in own)
    if broken:
        return f"{broken} of {len(own)} broke"
    found = difference(own, one)
    if found is None:
        return NONE
    text = f"{100 * found.mean:+z.2f}"
    return text if found.half_width is None else f"{text} ± {100 * found.half_width:.2f}"


TABLES = grids_report.TABLES
TABLES_OVER_ALL = {"differences": differences_table}
main = partial(run_grid, "averaging_rules", GRIDS)


if __name__ == "__main__":
    raise SystemExit(main())
