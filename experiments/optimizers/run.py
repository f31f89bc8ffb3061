"""Trains 1 to 32 learners by Nesterov SGD and by Muon, and by several rules, and writes results/GRID.json.

    python experiments/optimizers/run.py resnet8 [--cells PATTERN] [--jobs N]

README.md says what is compared. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.grids import report
from experiments.grids.grid import RESNET8, Cell, Grid, Label, merged
from experiments.grids.running import run_grid

POWER = 0.75  # rates are those of one learner times K to this power, which was best at 4 and 16 (one seed)
NUM_LEARNERS = (1, 2, 4, 8, 16, 32)
GRADIENTS = "averaged gradients"
RULES = {
    GRADIENTS: "averaging=synchronous_sgd",
    "sma": "averaging=sma",
    "crossbow": "averaging=crossbow",
    "grouped_sma of 4": "averaging=grouped_sma averaging.group_size=4",
}
OF_RULES = {"SGD": (4, 16), "Muon": (4, 16)}
BEST_ONE = "Muon, K=1"
_COMMON = (
    f"+experiment=resnet32_short {RESNET8} data=cifar10 batch_size=32 max_epochs=2 precision=bf16 label_smoothing=0.1 "
    "schedule=wsd schedule.cooldown=1 schedule.warmup_epochs=0.1 checkpoint_every_s=120"
)


def optimizer(name: str, num_learners: int) -> str:
    """The overrides of an optimizer for K learners."""
    scale = num_learners**POWER
    if name == "SGD":
        return f"optimizer=resnet_short optimizer.learning_rate={0.1 * scale:.4g}"
    return (
        f"optimizer=muon optimizer.learning_rate={0.03 * scale:.4g} optimizer.other_learning_rate={0.1 * scale:.4g} "
        f"optimizer.momentum={0.9 if num_learners == 1 else 0.8} optimizer.normalize_weights=true"
    )


def cell(name: str, rule: str, num_learners: int) -> Cell:
    """Learners with an optimizer and a rule; fused where there are several, as the fastest way here."""
    executor = "serial" if num_learners == 1 else "fused"
    words = (
        f"{RULES[rule]} averaging.rate_scaling=none averaging.average_ema=null {optimizer(name, num_learners)} "
        f"num_learners={num_learners} executor={executor}"
    )
    said = f"{name}, K={num_learners}" if rule == GRADIENTS else f"{name}, K={num_learners}, {rule}"
    labels: dict[str, Label] = {"optimizer": name, "rule": rule, "num_learners": num_learners}
    return Cell(said, merged(_COMMON.split(), words.split()), labels)


def every_cell() -> tuple[Cell, ...]:
    found = [cell(name, GRADIENTS, k) for name in OF_RULES for k in NUM_LEARNERS]
    for name, numbers in OF_RULES.items():
        for k in numbers:
            rules = [rule for rule in RULES if rule != GRADIENTS and not (rule.startswith("grouped") and k == 4)]
            found += [cell(name, rule, k) for rule in rules]
    return tuple(found)


GRIDS = {
    "resnet8": Grid(
        "resnet8", "ResNet-8 on CIFAR-10, learners of 32 samples, 2 epochs", every_cell(), reference=BEST_ONE
    )
}
TABLES = report.TABLES
main = partial(run_grid, "optimizers", GRIDS)


if __name__ == "__main__":
    raise SystemExit(main())
