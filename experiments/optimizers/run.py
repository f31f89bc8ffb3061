"""Trains 1 to 32 learners by Nesterov SGD and by Muon, and by several rules, and writes results/GRID.json.

    python experiments/optimizers/run.py resnet8|resnet8_by_muon|lenet|lenet_b1024 [--cells PATTERN] [--jobs N]

README.md says what is compared. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.grids import report
from experiments.grids.grid import NESTEROV, RESNET8, RESNET_BY_SGD, Cell, Grid, Label, merged
from experiments.grids.running import run_grid
from experiments.tables.markdown import NONE, markdown_table

POWER = 0.75  # rates are those of one learner times K to this power, which was best at 4 and 16 (one seed)
NUM_LEARNERS = (1, 2, 4, 8, 16, 32)
GRADIENTS, GROUPED = "averaged gradients", "grouped_sma of 4"
RULES = {
    GRADIENTS: "averaging=synchronous_sgd",
    "sma": "averaging=sma",
    "crossbow": "averaging=crossbow",
    GROUPED: "averaging=grouped_sma averaging.group_size=4",
}
OPTIMIZERS = ("SGD", "Muon")
_SHORT = "label_smoothing=0.1 schedule=wsd schedule.cooldown=1 checkpoint_every_s=120"
_LENET = f"+experiment=lenet data=cifar10 {_SHORT} schedule.warmup_epochs=0.25"


@dataclass(frozen=True)
class Model:
    """A model with the command that trains it, and the learning rates of one learner of 32 samples."""

    common: str
    precision: str
    sgd: str
    sgd_rate: float
    muon_rate: float
    other_rate: float
    normalizes: bool

    def optimizer(self, name: str, scale: float) -> str:
        """The overrides of an optimizer, for `scale` times the samples in a round."""
        factor = scale**POWER
        if name == "SGD":
            return f"{self.sgd} optimizer.learning_rate={self.sgd_rate * factor:.4g}"
        return (
            f"optimizer=muon optimizer.weight_decay=0 optimizer.learning_rate={self.muon_rate * factor:.4g} "
            f"optimizer.other_learning_rate={self.other_rate * factor:.4g} "
            f"optimizer.momentum={0.9 if scale == 1 else 0.8}"
        )

    def cell(self, name: str, num_learners: int, rule: str = GRADIENTS, batch: int = 32) -> Cell:
        """Learners with an optimizer and a rule; fused where there are several, as the fastest way here."""
        normalizes = name == "Muon" and self.normalizes
        words = (
            f"{RULES[rule]} averaging.rate_scaling=none averaging.average_ema=null batch_size={batch} "
            f"precision={self.precision} "
            f"{self.optimizer(name, num_learners * batch / 32)} num_learners={num_learners} "
            f"executor={'serial' if num_learners == 1 else 'fused'}{' optimizer.normalize_weights=true' * normalizes}"
        )
        said = f"{name}, K={num_learners}" if rule == GRADIENTS else f"{name}, K={num_learners}, {rule}"
        labels: dict[str, Label] = {"optimizer": name, "rule": rule, "num_learners": num_learners}
        return Cell(said, merged(self.common.split(), words.split()), labels)


RESNET = Model(
    f"{RESNET_BY_SGD} {RESNET8} data=cifar10 max_epochs=2 {_SHORT} schedule.warmup_epochs=0.1", "bf16",
    NESTEROV, sgd_rate=0.1, muon_rate=0.03, other_rate=0.1, normalizes=True,
)  # fmt: skip
RESNET_PULLED = replace(RESNET, normalizes=False)  # a pull would undo it, and it is refused
RESNET_PULLED_FP32 = replace(RESNET_PULLED, precision="fp32")
LENET = Model(
    f"{_LENET} max_epochs=5", "bf16", "optimizer=sgd optimizer.weight_decay=1e-4 optimizer.nesterov=true", 0.01,
    muon_rate=0.00625, other_rate=0.0125, normalizes=False,
)  # fmt: skip
LENET_LONG = replace(LENET, common=f"{_LENET} max_epochs=15", precision="fp32")


def of_resnet8() -> tuple[Cell, ...]:
    found = [RESNET.cell(name, k) for name in OPTIMIZERS for k in NUM_LEARNERS]
    found += [RESNET.cell("SGD", k, rule) for k in (4, 16) for rule in ("sma", "crossbow")]
    return (*found, *(RESNET_PULLED.cell(name, 16, GROUPED) for name in OPTIMIZERS))


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("resnet8", "ResNet-8 on CIFAR-10, learners of 32 samples, 2 epochs", of_resnet8(), reference="Muon, K=1"),
        Grid(
            "resnet8_by_muon", "ResNet-8 on CIFAR-10 by Muon, weights not normalised, 4 learners of 32, 2 epochs",
            tuple(RESNET_PULLED_FP32.cell("Muon", 4, rule) for rule in (GRADIENTS, "sma", "crossbow")),
            reference="Muon, K=4",
        ),
        Grid(
            "lenet", "LeNet on CIFAR-10, learners of 32 samples, 5 epochs",
            (*(LENET.cell("SGD", k) for k in (1, 4, 16)), *(LENET.cell("Muon", k) for k in (4, 16))),
            reference="SGD, K=1",
        ),
        Grid(
            "lenet_b1024", "LeNet on CIFAR-10, 1,024 samples a round, 15 epochs",
            (LENET_LONG.cell("SGD", 1, batch=128), *(LENET_LONG.cell(name, 8, batch=128) for name in OPTIMIZERS)),
            reference="SGD, K=1",
        ),
    )
}  # fmt: skip


def by_learners(result: report.Result) -> str:
    """Mean test accuracy by optimizer, in a column for every number of learners that average gradients."""
    found: dict[str, dict[int, float | None]] = {}
    for name, runs in report.by_cell(result).items():
        labels, final = runs[0]["labels"], report.summarize(name, runs, ()).final
        if labels["rule"] == GRADIENTS:
            mean = None if final is None else final.mean
            found.setdefault(labels["optimizer"], {})[labels["num_learners"]] = mean
    numbers = sorted({number for own in found.values() for number in own})
    rows = [[name, *(percent(own.get(number)) for number in numbers)] for name, own in found.items()]
    return markdown_table(["test accuracy, learners", *map(str, numbers)], rows)


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


TABLES = {**report.TABLES, "by_learners": by_learners}
main = partial(run_grid, "optimizers", GRIDS)


if __name__ == "__main__":
    raise SystemExit(main())
