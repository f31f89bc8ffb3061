"""Settings of this process on the host: freed memory, denormal numbers, and the threads that share an operator."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_REPEATS = 2
_VALUES_A_THREAD = 2**15  # the fewest for which torch uses another thread
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_HUGEPAGE = 14
_BLOCK = 2**30 - 2**21  # about the largest block that glibc takes from its heap
_HUGE_PAGE = 2**21  # on x86 and most ARM kernels


@functools.cache
def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory, in huge pages, instead of returning it to the kernel after every round.

    Activations are freed and allocated again in each round. By default each time costs page faults (measured on two
    cores, ResNet-32 b=16, 45 steps: over 10⁵ faults against 2 to 10 · 10³), and rounds of many learners use more small
    pages than a core's TLB holds (MLP, K=8, fused: 7 to 14 % of a round).

    This cannot be undone, and affects the whole process, but only memory allocated afterwards. Without glibc it does
    nothing.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return
    # Older glibc caps the mmap threshold at 32 MiB. The trim threshold is set only if the other was: by itself it
    # would stop glibc from raising the mmap threshold on its own, which is worse than no change.
    whole = mallopt(_M_MMAP_THRESHOLD, 2**30)
    if not (whole or mallopt(_M_MMAP_THRESHOLD, 2**25)):
        return
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    if whole and hasattr(libc, "madvise"):
        _reserve_huge_pages(libc, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)


def _reserve_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Stretch glibc's heap by `size` bytes in huge pages, which takes only addresses, and no memory until used."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [libc.malloc(_BLOCK) for _ in range(max(1, size // _BLOCK))]
    for block in blocks:
        if block is not None:  # the kernel may refuse
            first, end = -(-block // _HUGE_PAGE) * _HUGE_PAGE, (block + _BLOCK) // _HUGE_PAGE * _HUGE_PAGE
            libc.madvise(first, end - first, _MADV_HUGEPAGE)  # on an error, pages stay small
            libc.free(block)


def flush_denormals() -> None:
    """Treat denormal numbers as zero in this thread and those it starts from now on, if the processor can.

    The momentum of weights that get no gradient any more shrinks by a factor a round. After some hundred rounds it is
    below the smallest normal float32, 1.2e-38, where operations on CPUs take many times as long: LeNet trained so by
    17 learners was 12 % slower.
    """
    torch.set_flush_denormal(True)


def flushes_denormals() -> bool:
    """Return whether this thread treats denormal numbers as zero."""
    return float(torch.tensor(1e-30, dtype=torch.float32, device="cpu") * 1e-10) == 0.0


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Have the block run with `flush_denormals`."""
    before = flushes_denormals()
    flush_denormals()
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Have the block run with this number of intra-op threads; MKL takes it over in every thread."""
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
    """Return the number of threads with which `work` is faster: 1, or as many as now. Runs it five times.

    Threads wait for each other at every operator, which costs more than it saves if work is small or if another program
    uses one of the cores.
    """
    most = torch.get_num_threads()
    if most == 1:
        return 1
    work()

    def seconds(num_threads: int) -> float:
        with intra_op_threads(num_threads):
            begun_s = time.perf_counter()
            work()
            return time.perf_counter() - begun_s

    return min((1, most), key=lambda number: min(seconds(number) for _ in range(_REPEATS)))


def threads_spin(num_cores: int) -> bool:
    """Return whether torch's threads spin while they wait for each other, if the process has `num_cores` cores."""
    return 1 < torch.get_num_threads() <= num_cores


class SleepingThreads:
    """Makes threads that share an operator sleep while they wait for each other, instead of spinning first.

    libgomp, which PyTorch's packages for Linux include, spins for some milliseconds, but hardly at all while there are
    more OpenMP threads than cores (`GOMP_SPINCOUNT` in its manual, which is read once, when torch is imported). An idle
    team of threads beside the working ones therefore makes all of them sleep. With another OpenMP runtime this has no
    effect. The results of operators do not depend on it.

    Call `start` and `stop` while no operator runs.
    """

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._over: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Let threads sleep. Does nothing if they do."""
        if self._thread is not None:
            return
        over = self._over = threading.Event()
        ready = threading.Event()
        # With torch's own threads one more than there are cores, counting the team's first thread.
        size = self._num_cores - torch.get_num_threads() + 2

        def hold_team() -> None:
            """Run one operator on a team of threads, which then idle until this thread ends."""
            with intra_op_threads(size):
                torch.zeros(size * _VALUES_A_THREAD, dtype=torch.int8)
            ready.set()
            over.wait()

        self._thread = threading.Thread(target=hold_team, name="crossbow idle team", daemon=True)
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """Let threads spin. Does nothing if they do."""
        if self._thread is not None and self._over is not None:
            self._over.set()
            self._thread.join()
            self._thread = None
