"""Which cells of the suite are measured, given what is known of their speed and the time there is. Pure.

A cell is a side at a batch size with a number of learners. Nothing is guessed in place of a measurement: a cell that is
not measured is left out, and its record says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from crossbow_py.engine.precision import PrecisionName
from experiments.throughput.gate import Visit
from experiments.throughput.sides import AUTO, OPEN, SINGLE_SIDES, Side

# The batch size at which every K is measured first, and what auto settles on.
MAIN_BATCH_SIZE = 16
# The learners that are measured first at the other batch sizes.
_MAIN_LEARNERS = (2, 8)
# Rounds after a change of K that are not like those that follow: queues fill, or CUDA graphs are captured.
_LEAD_IN_ROUNDS = {"threads": 2, "streams": 4, AUTO: 2}
# What a model takes of the time, roughly: rounds of the large ones are long whatever the device.
_WEIGHTS = {"mlp": 1.0, "lenet": 1.0, "resnet32": 1.5, "vgg16": 3.0}
_OTHER_WEIGHT = 2.0

Cause = Literal["round", "time", "failure"]


@dataclass(frozen=True)
class Limits:
    """`passes` windows a cell, of `window_s` and at least one round, after a lead-in; no round over `max_round_s`."""

    passes: int = 3
    window_s: float = 0.15
    lead_in_s: float = 0.05
    max_round_s: float = 2.0


@dataclass(frozen=True)
class Cell:
    """A side at a batch size; K of an executor is in the side."""

    batch_size: int
    side: Side

    @property
    def images_per_round(self) -> int:
        """Of all learners."""
        return self.batch_size * max(1, self.side.num_learners)

    @property
    def process_key(self) -> tuple[int, str]:
        """Cells of an executor and batch size share a process, in which K changes from window to window."""
        return self.batch_size, self.side.side


@dataclass(frozen=True)
class LeftOut:
    """Why a cell is not measured."""

    cause: Cause
    reason: str


@dataclass(frozen=True)
class Cells:
    """In the order of their turn: one model, all K at the main batch size, auto there, and then what remains.

    `single` and `auto` are always measured, the others while there is time: from short rounds to long ones, at other
    batch sizes a few K first, and `serial` with K > 1 last (its learners take turns, so to leave it out loses least).
    """

    single: Sequence[Cell]
    main: Sequence[Cell]
    auto: Sequence[Cell]
    others: Sequence[Cell]


def plan_cells(
    batch_sizes: Sequence[int], num_learners: Sequence[int], executors: Iterable[str], precision: PrecisionName
) -> Cells:
    """All that there is to measure of a model."""
    main = MAIN_BATCH_SIZE if MAIN_BATCH_SIZE in batch_sizes else min(batch_sizes)
    single = (Side("default_loop", 1, "none", "fp32"), Side("tuned_single", 1, "none", precision))
    sides = [Side(name, k, "sma", precision) for name in executors for k in num_learners]
    first = [Cell(main, side) for side in sides if not _is_repetitive(side)]
    others = [Cell(b, side) for b in batch_sizes for side in (*single, *sides) if b != main or _is_repetitive(side)]
    return Cells(
        single=[Cell(main, side) for side in single],
        main=sorted(first, key=_place),
        auto=[Cell(main, Side(AUTO, OPEN, "sma", precision))],
        others=sorted(others, key=lambda cell: (not _is_first(cell.side), *_place(cell))),
    )


def _place(cell: Cell) -> tuple[bool, int, int]:
    return _is_repetitive(cell.side), cell.images_per_round, cell.batch_size


def _is_repetitive(side: Side) -> bool:
    return side.side == "serial" and side.num_learners > 1


def _is_first(side: Side) -> bool:
    few = side.num_learners in _MAIN_LEARNERS or side.side in (*SINGLE_SIDES, "serial")
    return few and not _is_repetitive(side)


def visit(cell: Cell, limits: Limits) -> Visit:
    """What to ask of the cell's process."""
    learners = None if cell.side.side in (*SINGLE_SIDES, AUTO) else cell.side.num_learners
    return Visit(limits.window_s, limits.lead_in_s, lead_in_rounds(cell.side), learners)


def lead_in_rounds(side: Side) -> int:
    """Before the clock of a window starts."""
    return _LEAD_IN_ROUNDS.get(side.side, 1)


def visit_s(cell: Cell, images_per_s: float, limits: Limits) -> float:
    """How long a window takes with its lead-in, at a throughput; both end with a round."""
    round_s = cell.images_per_round / images_per_s
    return max(limits.lead_in_s, lead_in_rounds(cell.side) * round_s) + max(limits.window_s, round_s)


def expected_images_per_s(cell: Cell, known: Mapping[Cell, float]) -> float | None:
    """Throughput of the most alike cell so far: its side at its batch size with most learners, its side, one model."""
    side = cell.side.side
    for alike in (
        [other for other in known if other.process_key == cell.process_key],
        [other for other in known if other.side.side == side],
        [other for other in known if other.side.side == "tuned_single"],
    ):
        if alike:
            return known[max(alike, key=lambda other: other.images_per_round)]
    return None


def expected_start_s(cell: Cell, known: Mapping[tuple[int, str], float]) -> float:
    """How long the cell's process takes to start: nothing where it runs, else by the same side at other batch sizes.

    `tuned_single` tries steps of its forms, which take longer with the batch size.
    """
    if cell.process_key in known:
        return 0.0
    b, side = cell.process_key
    power = 1 if side == "tuned_single" else 0
    return max(
        ((b / other) ** power * seconds for (other, name), seconds in known.items() if name == side), default=0.0
    )


def left_out(cell: Cell, images_per_s: float, start_s: float, left_s: float, limits: Limits) -> LeftOut | None:
    """Why a cell is not to be measured, when `left_s` are not promised to others; None when it is."""
    round_s = cell.images_per_round / images_per_s
    if round_s > limits.max_round_s:
        reason = f"a round of {cell.images_per_round} images would take about {round_s:.1f} s"
        return LeftOut("round", f"{reason}, over the limit of {limits.max_round_s:g} s")
    all_s = start_s + limits.passes * visit_s(cell, images_per_s, limits)
    if all_s > left_s:
        left = f"{max(0.0, left_s):.1f} s of its model's time were left"
        return LeftOut("time", f"its {limits.passes} windows would take about {all_s:.1f} s, and {left}")
    return None


def share_s(left_s: float, models: Sequence[str]) -> float:
    """What the first of the models gets of the time left for all of them; what it does not use, the others get."""
    weights = [_WEIGHTS.get(model, _OTHER_WEIGHT) for model in models]
    return left_s * weights[0] / sum(weights)
