"""Two runs at the same time, each on a core of its own: what slows the machine down slows both down."""

from __future__ import annotations

import bisect
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from crossbow_py.core.errors import UserError
from crossbow_py.core.host import foreign_share, usable_core_ids
from crossbow_py.telemetry.events import Listener, Progress
from experiments.bench.machine import on_cores
from experiments.bench.windows import load_with_ended

Mark = tuple[float, int]  # seconds on the clock of all processes, and samples seen
Side = Callable[[Listener], Any]  # trains, and tells the listener; what it returns is sent back
MOST_FOREIGN_SHARE = 0.05  # of two cores: all of it may be the core of one side
_SETTLING_S = 1.0


class Couple(NamedTuple):
    """What came of two pairs of runs, in which the sides had each other's cores.

    Attributes:
        ratios: the images/s of the first side ÷ those of the second, of each pair, while both trained; None if they
            never did.
        answers: what the first side returned each time.
        foreign_share: the most that other programs took of the two cores; None when the kernel does not tell.
    """

    ratios: tuple[float | None, float | None]
    answers: tuple[Any, Any]
    foreign_share: float | None

    @property
    def ratio(self) -> float | None:
        """The ratio without what one core is faster than the other; None where it is unknown or others were busy."""
        first, second = self.ratios
        if not first or not second or (self.foreign_share or 0.0) > MOST_FOREIGN_SHARE:
            return None
        return math.sqrt(first * second)


class Marks(Listener):
    """Notes how far a run is at what time."""

    def __init__(self) -> None:
        self.marks = list[Mark]()

    def on_progress(self, progress: Progress) -> None:
        self.marks.append((time.monotonic(), progress.samples_seen))


def run_couple(first: Side, second: Side) -> Couple:
    """Run both sides at once, each in a process of its own on a core of its own; and again on each other's core.

    Raises:
        UserError: there are no two cores, or a side has failed.
    """
    cores = sorted(usable_core_ids())[:2]
    if len(cores) < 2:
        raise UserError("two runs side by side need two cores; run this on a machine that has them.")
    pairs = [_run_pair((first, second), cores), _run_pair((first, second), cores[::-1])]
    ratios, answers, shares = zip(*pairs, strict=True)
    return Couple(ratios, answers, max((share for share in shares if share is not None), default=None))


def _run_pair(sides: Sequence[Side], cores: Sequence[int]) -> tuple[float | None, Any, float | None]:
    """Return the ratio, what the first side returned, and what others took of these cores."""
    context, runs = multiprocessing.get_context("spawn"), []
    with on_cores(set(cores)):
        before = load_with_ended()
        for side, core in zip(sides, cores, strict=True):
            ours, theirs = context.Pipe()
            with on_cores({core}):
                process = context.Process(target=_run, args=(side, theirs))
                process.start()
            theirs.close()
            runs.append((process, ours))
        try:
            (own, answer), (base, _) = (connection.recv() for _, connection in runs)
        except EOFError as error:
            for process, _ in runs:
                process.terminate()
            raise UserError("a run failed, by what it has printed above; correct that, and measure again.") from error
        for process, _ in runs:
            process.join()
        return ratio_of(own, base), answer, foreign_share(before, load_with_ended())


def ratio_of(own: Sequence[Mark], base: Sequence[Mark], settling_s: float = _SETTLING_S) -> float | None:
    """Return the images/s of one run ÷ those of the other while both trained, but for the beginning of that time."""
    if not own or not base:
        return None
    begin, end = max(own[0][0], base[0][0]) + settling_s, min(own[-1][0], base[-1][0])
    if end <= begin:
        return None
    seen, of_base = (_seen(marks, end) - _seen(marks, begin) for marks in (own, base))
    return seen / of_base if of_base else None


def _seen(marks: Sequence[Mark], at_s: float) -> float:
    """Samples seen at a time between the first mark and the last, as if they came evenly between two marks."""
    index = bisect.bisect_right(marks, at_s, hi=len(marks) - 1, key=lambda mark: mark[0])
    (before_s, before), (after_s, after) = marks[index - 1], marks[index]
    return before + (after - before) * (at_s - before_s) / (after_s - before_s)


def _run(side: Side, connection: Connection) -> None:
    torch.set_num_threads(1)
    marks = Marks()
    answer = side(marks)
    connection.send((marks.marks, answer))
