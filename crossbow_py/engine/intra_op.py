"""The threads torch splits one operator over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

_REPEATS = 2


@contextlib.contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Have the block run with so many; for MKL that holds in every thread."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def faster_threads(work: Callable[[], object]) -> int:
    """1 thread, or as many as now: with which `work`, run five times, takes less time.

    Threads wait for each other at every operator, which costs more than it saves where work is small or where another
    program has one of the cores.
    """
    most = torch.get_num_threads()
    if most == 1:
        return 1
    work()
    return min((1, most), key=lambda number: min(_seconds(work, number) for _ in range(_REPEATS)))


def _seconds(work: Callable[[], object], num_threads: int) -> float:
    with intra_op_threads(num_threads):
        begun_s = time.perf_counter()
        work()
        return time.perf_counter() - begun_s
