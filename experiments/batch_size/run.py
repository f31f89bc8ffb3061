"""Trains one model with batches of 8 to 1024 samples to a target accuracy, and learners with as many together.

    python experiments/batch_size/run.py digits|lenet [--cells PATTERN] [--seeds 0,1,...] [--jobs N]

Writes results/GRID.json; README.md says what is compared. A cell that is done is not run again.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

from experiments.grids.grid import CROSSBOW, Cell, Grid, merged
from experiments.grids.report import Reached, Result, by_cell, notes, reached, when
from experiments.grids.running import run_grid
from experiments.tables.markdown import NONE, markdown_table

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
                     f"{CROSSBOW} averaging.rate_scaling=none executor=fused precision=fp32", 0.05, 16, parts=2),
            seeds=(0, 1, 2, 3, 4), targets=(0.97,),
        ),
        Grid(
            "lenet",
            "LeNet on MNIST to 99 %",
            cells_of("+experiment=lenet label_smoothing=0 optimizer.nesterov=false schedule=constant max_epochs=10 "
                     f"target_accuracy=0.99 {CROSSBOW} averaging.rate_scaling=none executor=fused precision=fp32",
                     0.03, 32, parts=4),
            targets=(0.99,),
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Best:
    """The best rate of a side with so many samples a round, over `n` seeds."""

    side: str
    total: int
    rate: float
    reached: Reached
    n: int


def best_rates(result: Result) -> list[Best]:
    """Find the best rate by side and samples a round: most seeds reach the target, then from the fewest samples."""
    found: dict[tuple[str, int], Best] = {}
    for runs in by_cell(result).values():
        labels = runs[0]["labels"]
        key = (labels["side"], labels["total"])
        own = Best(*key, labels["rate"], reached(runs, result["targets"][0]), len(runs))
        if key not in found or _rank(own) > _rank(found[key]):
            found[key] = own
    return list(found.values())


def _rank(best: Best) -> tuple[float, float]:
    samples = best.reached.samples
    return best.reached.n / best.n, -float("inf") if samples is None else -samples


def batches_table(result: Result) -> str:
    found = {(best.side, best.total): best for best in best_rates(result)}
    header = ["samples a round"]
    for name in (ONE, f"K · {LEARNER_BATCH}"):
        header += [f"{name}: rate", "epochs", "seconds", "n"]
    rows = [
        [str(total), *(cell for side in (ONE, LEARNERS) for cell in _cells(found.get((side, total))))]
        for total in sorted({total for _, total in found})
    ]
    return markdown_table(header, rows)


def _cells(best: Best | None) -> list[str]:
    if best is None:
        return [""] * 4
    own = best.reached
    rate = f"{best.rate:.4g}" if own.n else NONE
    return [rate, when(own, own.epochs, best.n, "{:.2f}"), when(own, own.seconds, best.n, "{:.1f}"), str(best.n)]


def result_text(result: Result) -> str:
    return f"![{result['title']}](results/{result['grid']}.png)\n\n{batches_table(result)}\n\n{notes(result)}"


TABLES = {"all": result_text}
main = partial(run_grid, "batch_size", GRIDS)


if __name__ == "__main__":
    raise SystemExit(main())
