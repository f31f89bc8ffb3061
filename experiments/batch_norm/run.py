"""Trains learners once and evaluates their average model with every kind of BatchNorm statistics; writes results.

    python experiments/batch_norm/run.py resnet8 [--cells PATTERN] [--seeds 0,1,...] [--jobs N]

README.md says what is compared. A cell that is done is not run again; `--list` says what would be run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.batch_norm.variants import MEAN, VARIANTS
from experiments.grids.grid import AS_RECORDED, CROSSBOW, RESNET8, RESNET_BY_SGD, Cell, Grid, cells
from experiments.grids.report import Result, Run, accuracy, by_cell, estimate, has_diverged, notes
from experiments.grids.running import run_grid
from experiments.tables.markdown import NONE, markdown_table

LEARNERS = {
    "crossbow, K=4": f"{CROSSBOW} num_learners=4",
    "crossbow, K=8": f"{CROSSBOW} num_learners=8",
    "local_sgd, K=4": "averaging=local_sgd averaging.rate_scaling=sqrt num_learners=4",
    "synchronous_sgd, linear, K=4": "averaging=synchronous_sgd_linear num_learners=4",
    "one learner": "averaging=sma num_learners=1",
    "one learner, b=8": "averaging=sma num_learners=1 batch_size=8 optimizer.learning_rate=0.025",
    "crossbow, K=4, b=8": f"{CROSSBOW} num_learners=4 batch_size=8 optimizer.learning_rate=0.025",
}


def measured(common: str, parts: int) -> tuple[Cell, ...]:
    """A cell for every kind of learners, evaluated so many times an epoch."""
    return tuple(replace(cell, program="experiments.batch_norm.variants") for cell in cells(common, LEARNERS, parts))


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("resnet8", "ResNet-8 on CIFAR-10, 2 epochs",
             measured(f"{RESNET_BY_SGD} {RESNET8} batch_size=32 max_epochs=2 precision=fp32 "
                      f"checkpoint_every_s=120 {AS_RECORDED}", parts=2),
             seeds=(0, 1)),
    )
}  # fmt: skip


def healthy(result: Result) -> dict[str, list[Run]]:
    """The runs of every cell that did not diverge; a cell of which all did is left out."""
    found = {name: [run for run in runs if not has_diverged(run)] for name, runs in by_cell(result).items()}
    return {name: runs for name, runs in found.items() if runs}


def curve(run: Run, variant: str) -> list[float]:
    """Test accuracies with one kind of statistics, evaluation by evaluation."""
    return [line["variants"][variant]["test_accuracy"] for line in run["measured"]]


def accuracies_table(result: Result) -> str:
    others = [name for name in VARIANTS if name != MEAN]
    header = ["", "K", "epochs", MEAN, *(f"{name}: − {MEAN}" for name in others), "n"]
    rows = []
    for name, runs in healthy(result).items():
        learners = str(runs[0]["summary"]["num_learners"])
        for place in range(min(len(run["measured"]) for run in runs)):
            epoch = mean(run["measured"][place]["epoch"] for run in runs)
            own = accuracy(estimate([curve(run, MEAN)[place] for run in runs]))
            differences = [
                accuracy(estimate([curve(run, each)[place] - curve(run, MEAN)[place] for run in runs]), signed=True)
                for each in others
            ]
            rows.append([name, learners, f"{epoch:.2f}", own, *differences, str(len(runs))])
    return markdown_table(header, rows)


def costs_table(result: Result) -> str:
    runs = [run for own in healthy(result).values() for run in own]
    alone = [run for run in runs if run["alone"]]
    rows = []
    for name in VARIANTS:
        lines = [line["variants"][name] for run in runs for line in run["measured"]]
        seconds = [line["variants"][name]["statistics_s"] for run in alone for line in run["measured"]]
        share = median(line["statistics_s"] / line["evaluation_s"] for line in lines)
        rows.append([name, f"{median(seconds):.3f}" if seconds else NONE, f"{share:.3f}"])
    return markdown_table(["statistics", "seconds", "of an evaluation's time"], rows)


def result_text(result: Result) -> str:
    picture = f"![{result['title']}](results/{result['grid']}.png)"
    if not healthy(result):
        return f"All runs diverged. {notes(result)}"
    said = f"{notes(result)} Costs as parts of an evaluation's time are of all runs."
    return f"{picture}\n\n{accuracies_table(result)}\n\n{costs_table(result)}\n\n{said}"


TABLES = {"all": result_text}
main = partial(run_grid, "batch_norm", GRIDS)


if __name__ == "__main__":
    raise SystemExit(main())
