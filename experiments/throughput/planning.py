"""The plan of the suite: which cells are measured, given what is known of their speed and the time there is. Pure.

A cell is a side at a batch size with a number of learners. Nothing is guessed in place of a measurement: a cell that is
not measured is left out, and its record says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.modules.precision import PrecisionName
from experiments.bench.gate import Visit
from experiments.bench.sides.side import AUTO, EXECUTOR_SIDES, OPEN, SINGLE_SIDES, Side

# The batch size at which every K is measured first, and what auto settles on.
MAIN_BATCH_SIZE = 16
# The learners that are measured first at the other batch sizes.
MAIN_LEARNERS = (2, 8)
# Rounds after a change of K or a pause that are not like those that follow, as queues fill.
_LEAD_IN_ROUNDS = {"threads": 2, "streams": 2, AUTO: 2}
# Rounds of a new process until a CUDA graph is captured and was replayed.
_CAPTURE_ROUNDS = 4
# What a model takes of the time, roughly. On a CPU rounds of the large ones are long; on a GPU deep ones take long to
# start, as they are captured and compiled.
_WEIGHTS = {
    "cpu": {"mlp": 1.0, "lenet": 1.0, "resnet32": 1.5, "vgg16": 3.0},
    "cuda": {"mlp": 1.0, "lenet": 1.0, "resnet32": 3.0, "vgg16": 2.0, "resnet50": 3.0},
}
_OTHER_WEIGHT = 2.0

Cause = Literal["round", "time", "failure"]


@dataclass(frozen=True)
class Limits:
    """`passes` windows a cell, of `window_s` and at least one round, after a lead-in; no round over `max_round_s`.

    `captures` says that executors make CUDA graphs of their rounds. Every change of K would capture anew, so there a
    process keeps its K, and captures before its first window.
    """

    passes: int = 3
    window_s: float = 0.15
    lead_in_s: float = 0.05
    max_round_s: float = 2.0
    captures: bool = False


class ProcessKey(NamedTuple):
    """The key of the process that measures a cell; `num_learners` is OPEN where K changes from window to window."""

    batch_size: int
    side: str
    num_learners: int = OPEN


@dataclass(frozen=True)
class Cell:
    batch_size: int
    side: Side

    @property
    def images_per_round(self) -> int:
        return self.batch_size * max(1, self.side.num_learners)

    def keeps_learners(self, limits: Limits) -> bool:
        """Return whether a process of its own measures the cell, with this K; else K changes from window to window."""
        return self.side.side in SINGLE_SIDES or (limits.captures and self.side.side != AUTO)

    def process_key(self, limits: Limits) -> ProcessKey:
        """Cells that keep no K share a process with others of their executor and batch size."""
        learners = self.side.num_learners if self.keeps_learners(limits) else OPEN
        return ProcessKey(self.batch_size, self.side.side, learners)


@dataclass(frozen=True)
class LeftOut:
    """Why a cell is not measured."""

    cause: Cause
    reason: str


@dataclass(frozen=True)
class Cells:
    """The cells in their order: one model, all K at the main batch size, auto there, what remains.

    `single` and `auto` are always measured, the others while there is time: from short rounds to long ones, at other
    batch sizes a few K first, and `serial` with K > 1 last (its learners take turns, so to leave it out loses least).
    """

    single: Sequence[Cell]
    main: Sequence[Cell]
    auto: Sequence[Cell]
    others: Sequence[Cell]


def plan_cells(
    batch_sizes: Sequence[int],
    num_learners: Sequence[int],
    executors: Iterable[str],
    precision: PrecisionName,
    captures: bool = False,
) -> Cells:
    """All that there is to measure of a model.

    Where executors capture their rounds (`captures`), a cell takes long to start and a round of whatever length is
    short: so at the main batch size the most of MAIN_LEARNERS come first, and K = 1 next.
    """
    main, compared = main_batch_size(batch_sizes), max(set(num_learners) & set(MAIN_LEARNERS) or num_learners)
    single = (Side("default_loop", 1, "none", "fp32"), Side("tuned_single", 1, "none", precision))
    sides = [Side(name, k, "sma", precision) for name in executors for k in num_learners
             # Groups of one learner each are `streams` by another name.
             if k > getattr(EXECUTORS[name], "STREAMS", 0)]  # fmt: skip
    first = [Cell(main, side) for side in sides if not _is_repetitive(side)]
    others = [Cell(b, side) for b in batch_sizes for side in (*single, *sides) if b != main or _is_repetitive(side)]
    return Cells(
        single=[Cell(main, side) for side in single],
        main=sorted(first, key=(lambda cell: _place_of_capture(cell, compared)) if captures else _place),
        auto=[Cell(main, Side(AUTO, OPEN, "sma", precision))],
        others=sorted(others, key=lambda cell: (not _is_first(cell.side), *_place(cell))),
    )


def main_batch_size(batch_sizes: Sequence[int]) -> int:
    return MAIN_BATCH_SIZE if MAIN_BATCH_SIZE in batch_sizes else min(batch_sizes)


def _place_of_capture(cell: Cell, compared: int) -> tuple[bool, bool, int, bool]:
    k = cell.side.num_learners
    return k != compared, k != 1, k, cell.side.side != "fused"


def _place(cell: Cell) -> tuple[bool, int, int]:
    return _is_repetitive(cell.side), cell.images_per_round, cell.batch_size


def _is_repetitive(side: Side) -> bool:
    return side.side == "serial" and side.num_learners > 1


def _is_first(side: Side) -> bool:
    """Return whether a side comes before others at batch sizes that are not the main one."""
    few = side.num_learners in MAIN_LEARNERS or side.side in (*SINGLE_SIDES, "serial")
    return few and not _is_repetitive(side)


def visit(cell: Cell, limits: Limits) -> Visit:
    learners = None if cell.keeps_learners(limits) or cell.side.side == AUTO else cell.side.num_learners
    return Visit(limits.window_s, limits.lead_in_s, lead_in_rounds(cell.side), learners)


def lead_in_rounds(side: Side) -> int:
    return _LEAD_IN_ROUNDS.get(side.side, 1)


def warm_up(side: Side, limits: Limits) -> Visit | None:
    """The visit of a new process before its first window, where it has to capture; its result means nothing."""
    captures = limits.captures and side.side in EXECUTOR_SIDES
    return Visit(0.0, lead_in_s=0.0, lead_in_ticks=_CAPTURE_ROUNDS) if captures else None


def visit_s(cell: Cell, images_per_s: float, limits: Limits) -> float:
    """The seconds of a window with its lead-in, at a throughput; both end with a round."""
    round_s = cell.images_per_round / images_per_s
    return max(limits.lead_in_s, lead_in_rounds(cell.side) * round_s) + max(limits.window_s, round_s)


def expected_images_per_s(cell: Cell, known: Mapping[Cell, float]) -> float | None:
    """Throughput of the most alike cell so far: its side at its batch size with most learners, its side, one model."""
    side = cell.side.side
    for alike in (
        [other for other in known if (other.batch_size, other.side.side) == (cell.batch_size, side)],
        [other for other in known if other.side.side == side],
        [other for other in known if other.side.side == "tuned_single"],
    ):
        if alike:
            return known[max(alike, key=lambda other: other.images_per_round)]
    return None


def expected_start_s(cell: Cell, known: Mapping[ProcessKey, float], limits: Limits) -> float:
    """The seconds that the cell's process takes to start: none where it runs, else by other processes of the same side.

    `tuned_single` tries steps of its forms, which take longer with the batch size.
    """
    if cell.process_key(limits) in known:
        return 0.0
    side = cell.side.side
    power = 1 if side == "tuned_single" else 0
    alike = [(key, seconds) for key, seconds in known.items() if key.side == side]
    return max(((cell.batch_size / key.batch_size) ** power * seconds for key, seconds in alike), default=0.0)


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


def share_s(left_s: float, models: Sequence[str], device: str) -> float:
    """The first model's share of the time left for all of them; what it does not use, the others get."""
    weights = [_WEIGHTS[device].get(model, _OTHER_WEIGHT) for model in models]
    return left_s * weights[0] / sum(weights)
