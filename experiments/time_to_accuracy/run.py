"""Seconds to a target accuracy: learners, one tuned model, and PyTorch's default loop; writes results/GRID.json.

    python experiments/time_to_accuracy/run.py lenet|resnet32 [--cells PATTERN] [--seeds 0,1,...]

README.md says what the sides are. Sides take turns, seed by seed; a run that is done is not made again.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from experiments.grids.command import run_grid
from experiments.grids.grid import Cell, Grid, cells, merged

LEARNERS, TUNED, DEFAULT = "learners", "one tuned model", "PyTorch's default loop"
DEFAULT_LOOP = "experiments.time_to_accuracy.default_loop"


def sides(recipe: str, num_learners: tuple[int, ...], batch: int, rate: float, parts: int = 1) -> tuple[Cell, ...]:
    """Learners by the recipe, and one model at the learner's batch and, with twice the rate, at twice of it."""
    single = {f"b={batch}": f"batch_size={batch}",
              f"b={2 * batch}": f"batch_size={2 * batch} optimizer.learning_rate={2 * rate:g}"}  # fmt: skip
    learners = cells(recipe, {f"{LEARNERS}, K={k}, b={batch}": f"num_learners={k}" for k in num_learners}, parts)
    tuned = cells(f"{recipe} num_learners=1", {f"{TUNED}, {own}": words for own, words in single.items()}, parts)
    default = tuple(
        Cell(f"{DEFAULT}, {own}", merged(recipe.split(), ("num_learners=1",), words.split()),
             program=DEFAULT_LOOP, parts=parts)
        for own, words in single.items()
    )
    kinds = ((LEARNERS, learners), (TUNED, tuned), (DEFAULT, default))
    return tuple(replace(cell, labels={"side": side}) for side, found in kinds for cell in found)


LENET = "+experiment=lenet max_epochs=2"
# Where small batches are far from the limit, both sides may be faster with larger ones.
LARGER = (
    *cells(LENET,
           {f"{LEARNERS}, K=2, b=64": "num_learners=2 batch_size=64 optimizer.learning_rate=0.06"}, parts=4),
    *cells(LENET,
           {f"{TUNED}, b=128": "num_learners=1 batch_size=128 optimizer.learning_rate=0.12"}, parts=4),
)  # fmt: skip
RESNET32 = "+experiment=resnet32_short max_epochs=12 checkpoint_every_s=120"
GRIDS = {
    grid.name: grid
    for grid in (
        Grid("lenet", "LeNet on MNIST",
             (*sides(LENET, (2, 4), 32, 0.03, parts=4),
              *(replace(cell, labels={"side": cell.name.partition(",")[0]}) for cell in LARGER)),
             seeds=(0, 1, 2, 3, 4), targets=(0.99,), alone=True),
        Grid("resnet32", "ResNet-32 on CIFAR-10",
             tuple(cell for cell in sides(RESNET32, (2,), 32, 0.1) if cell.name != f"{DEFAULT}, b=32"),  # 64 is faster
             seeds=(0, 1), targets=(0.88, 0.9), alone=True),
    )
}  # fmt: skip

main = partial(run_grid, "time_to_accuracy", GRIDS)

if __name__ == "__main__":
    raise SystemExit(main())
