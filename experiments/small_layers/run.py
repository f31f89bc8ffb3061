"""How much sooner are rounds of small models over, if their layers run in C instead of by torch's operators?

    python experiments/small_layers/run.py [--shapes NAME ...] [--repetitions N] [--json PATH]

README.md says what is compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from torch import Tensor, nn

from crossbow_py import SGD, Trainer, UserError
from crossbow_py.core.host import LoadSnapshot, foreign_share
from crossbow_py.engine.native.library import IN_USE
from crossbow_py.train.loop.learners import new_executor
from crossbow_py.train.loop.planning import plan_round
from experiments.bench.program import count, measure_and_write, measuring_parser
from experiments.bench.windows import by_turns, clean_window, paired_ratios, spread
from experiments.tables.markdown import NONE, markdown_table, spread_text

_WINDOW_S = 0.1
C, TORCH = "C", "torch"


class Shape(NamedTuple):
    """K learners with batches of b samples, through layers of these widths, or a recurrent layer of so many steps."""

    learners: int
    batch_size: int
    widths: tuple[int, ...]
    steps: int = 0  # of a GRU from widths[0] to widths[1], if any


class GRU(nn.Module):
    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(width, hidden, batch_first=True), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])  # type: ignore[no-any-return]


SHAPES = {
    "tables": Shape(32, 32, (20, 64, 64, 2)),
    "digits": Shape(16, 32, (784, 64, 10)),
    "many": Shape(64, 32, (784, 64, 10)),
    "tiny": Shape(256, 16, (16, 16, 2)),
    "larger batches": Shape(16, 128, (64, 64, 10)),
    "much larger batches": Shape(8, 2048, (64, 64, 10)),
    "widest": Shape(16, 32, (784, 128, 128, 10)),
    "wide inputs": Shape(16, 32, (3072, 128, 10)),
    "very wide inputs": Shape(8, 32, (9216, 128, 10)),
    "one model": Shape(1, 32, (784, 64, 10)),
    "many classes": Shape(8, 64, (64, 64, 1000)),
    "very many classes": Shape(2, 256, (64, 64, 8000)),
    "GRU of 32": Shape(16, 16, (4, 32, 2), 24),
    "GRU of 128": Shape(16, 16, (28, 128, 10), 28),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__, "--max-foreign-share")
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES), help="default: all")
    parser.add_argument("--repetitions", type=count, default=15, help="windows of 0.1 s a side (default %(default)s)")
    return measure_and_write(parser, argv, measure, result_text)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    return {"rows": [measured(name, given.repetitions, given.max_foreign_share) for name in given.shapes]}


def measured(name: str, repetitions: int, most_foreign: float) -> dict[str, Any]:
    """Take windows of both sides in turns: seconds a round by repetition, None where others were busy."""
    sides, found = dict[str, Callable[[], object]](), dict[str, list[float | None]]({C: [], TORCH: []})
    for side in (C, TORCH):
        with only(side):
            sides[side] = rounds(SHAPES[name])
    for side in by_turns(list(sides), repetitions):
        with only(side):
            taken, _ = clean_window(partial(window, sides[side]), max_foreign_share=most_foreign)
        found[side].append(taken and taken.seconds)
    if not paired_ratios(found[TORCH], found[C]):
        busy = f"other programs took too much of the cores while {name!r} was measured"
        raise UserError(f"{busy}; try later, or raise --max-foreign-share")
    return {
        "name": name, **SHAPES[name]._asdict(), "n": sum(own is not None for own in found[C]),
        **{f"{side}_ms": 1000 * median(filter(None, found[side])) if any(found[side]) else None for side in sides},
        "ratios": spread(paired_ratios(found[TORCH], found[C])),
    }  # fmt: skip


class Window(NamedTuple):
    """Seconds a round, and what others took of the cores."""

    seconds: float
    foreign_share: float | None


def window(another: Callable[[], object]) -> Window:
    before, begun, number = LoadSnapshot.take(), time.perf_counter(), 0
    while (seconds := time.perf_counter() - begun) < _WINDOW_S:
        another()
        number += 1
    return Window(seconds / number, foreign_share(before, LoadSnapshot.take()))


@contextmanager
def only(side: str) -> Iterator[None]:
    """Run layers by torch's operators, if that is the side."""
    before = IN_USE.set(side == C)
    try:
        yield
    finally:
        IN_USE.reset(before)


def rounds(shape: Shape) -> Callable[[], object]:
    """Return what runs another round, with an executor that has learned from two."""
    torch.manual_seed(0)
    size = (shape.steps, shape.widths[0]) if shape.steps else shape.widths[:1]
    count = max(256, shape.batch_size)
    trainer = Trainer(
        model=lambda: GRU(*shape.widths) if shape.steps else layers(shape.widths),
        train_data=(torch.randn(count, *size), torch.arange(count) % shape.widths[-1]), num_classes=shape.widths[-1],
        optimizer=SGD(learning_rate=0.001, momentum=0.9), averaging="independent", num_learners=shape.learners,
        batch_size=shape.batch_size, executor="fused", precision="fp32", device="cpu",
    )  # fmt: skip
    run, index = trainer.run, iter(range(10**9))
    executor = new_executor(run)

    def another() -> None:
        now = next(index)
        executor.submit(plan_round(run, now, now * shape.batch_size, 1.0))
        executor.drain()

    for _ in range(2):
        another()
    return another


def layers(widths: Sequence[int]) -> nn.Module:
    pairs = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths[:-1])]
    return nn.Sequential(*pairs, nn.Linear(widths[-2], widths[-1]))


def result_text(result: Mapping[str, Any]) -> str:
    rows = [
        [
            row["name"], str(row["learners"]), str(row["batch_size"]), "-".join(map(str, row["widths"])),
            *(NONE if row[key] is None else f"{row[key]:.2f}" for key in ("torch_ms", "C_ms")),
            spread_text(row["ratios"]), str(row["n"]),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return markdown_table(["", "K", "batch", "widths", "torch, ms a round", "C, ms a round", "torch ÷ C", "n"], rows)


TABLES = {"all": result_text}

if __name__ == "__main__":
    raise SystemExit(main())
