"""The threads torch splits one operator over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch

_REPEATS = 2
_VALUES_A_THREAD = 2**15  # fewer are not worth a thread to torch


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


def threads_spin(num_cores: int) -> bool:
    """Whether torch's threads wait for each other, and spin while they do, where a process has so many cores."""
    return 1 < torch.get_num_threads() <= num_cores


class SleepingThreads:
    """Has threads that share an operator sleep while they wait for each other, where they would spin first.

    libgomp, which PyTorch's packages for Linux bring, spins for some milliseconds, but hardly at all while there are
    more OpenMP threads than cores (`GOMP_SPINCOUNT` in its manual, which is read once, when torch is imported). So an
    idle team of threads beside those at work has all of them sleep, as long as it is there. With another OpenMP
    runtime this has no effect. What operators compute does not depend on it.

    Call `start` and `stop` while no operator runs.
    """

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._over: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Let threads sleep; no effect when they do."""
        if self._thread is not None:
            return
        self._over, ready = threading.Event(), threading.Event()
        size = self._num_cores - torch.get_num_threads() + 2  # one more than there are cores, its first thread included
        self._thread = threading.Thread(
            target=_hold_team, args=(size, ready, self._over), name="crossbow idle team", daemon=True
        )
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """Let threads spin; no effect when they do."""
        if self._thread is not None and self._over is not None:
            self._over.set()
            self._thread.join()
            self._thread = None


def _hold_team(size: int, ready: threading.Event, over: threading.Event) -> None:
    """Run one operator on a team of so many threads of this one's own, which then idle until it ends."""
    with intra_op_threads(size):
        torch.zeros(size * _VALUES_A_THREAD, dtype=torch.int8)
    ready.set()
    over.wait()
