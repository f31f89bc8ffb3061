"""Two runs at the same time, each on a core of its own: what slows the machine down slows both down."""

from __future__ import annotations

import bisect
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
_SETTLING_S = 1.0


class Pair(NamedTuple):
    """What came of two runs.

    Attributes:
        ratio: the images/s of the first ÷ those of the second, while both trained; None if they never did.
        answers: what the sides returned.
        foreign_share: the part of the processor that other programs took; None when the kernel does not tell.
    """

    ratio: float | None
    answers: tuple[Any, Any]
    foreign_share: float | None


class Marks(Listener):
    """Notes how far a run is at what time."""

    def __init__(self) -> None:
        self.marks = list[Mark]()

    def on_progress(self, progress: Progress) -> None:
        self.marks.append((time.monotonic(), progress.samples_seen))


def run_pair(first: Side, second: Side, is_swapped: bool) -> Pair:
    """Run both at once, in processes of their own, on the first core and the second, or on the second and the first."""
    cores = sorted(usable_core_ids())
    if len(cores) < 2:
        raise UserError("two runs side by side need two cores; run this on a machine that has them.")
    context = multiprocessing.get_context("spawn")
    before, runs = load_with_ended(), []
    for side, core in zip((first, second), cores[1::-1] if is_swapped else cores[:2], strict=True):
        ours, theirs = context.Pipe()
        with on_cores({core}):
            process = context.Process(target=_run, args=(side, theirs))
            process.start()
        theirs.close()
        runs.append((process, ours))
    told = [connection.recv() for _, connection in runs]  # a side that failed has closed its end: EOFError
    for process, _ in runs:
        process.join()
    (own, answer), (base, other) = told
    return Pair(ratio_of(own, base), (answer, other), foreign_share(before, load_with_ended()))


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
