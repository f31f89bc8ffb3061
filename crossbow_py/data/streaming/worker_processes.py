"""How worker processes are started, and what signals they leave to the run."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

# How torch's errors about its files in /dev/shm begin: a plain RuntimeError, which differs from others in its words.
_NO_SHARED_MEMORY = ("unable to open shared memory", "unable to allocate shared memory", "unable to resize file")


def start_method() -> str | None:
    """Forked where that is usual: workers then start at once, and data sets need not be pickled."""
    return "fork" if "fork" in multiprocessing.get_all_start_methods() and os.name == "posix" else None


def leave_signals_to_the_run(_: int) -> None:
    """For `worker_init_fn`: Ctrl-C goes to every process of a terminal, and the run ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shared_images(count: int, batch_size: int, shape: tuple[int, int, int]) -> Tensor | None:
    """uint8 [count, batch_size, C, H, W], images channels last, which forked processes share; None where none fork.

    It is anonymous memory: /dev/shm, of which containers have little, has no part in it. Pages are faulted in once,
    where every batch of its own would have new ones (measured: 8 to 13 ms for 4.8 MB, against 0.2 ms in one process).
    """
    if start_method() is None:
        return None
    channels, height, width = shape
    memory = mmap.mmap(-1, count * batch_size * channels * height * width)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    return values.view(count, batch_size, height, width, channels).permute(0, 1, 4, 2, 3)


def shared_notes(num_workers: int, columns: int) -> Tensor:
    """int64 [max(1, num_workers), columns] of zeros, which worker processes share; not in /dev/shm where they fork."""
    shape = (max(1, num_workers), columns)
    if start_method() is None:
        return torch.zeros(shape, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call,no-any-return]
    return torch.frombuffer(mmap.mmap(-1, 8 * shape[0] * shape[1]), dtype=torch.int64).view(shape)


def says_no_shared_memory(error: BaseException) -> bool:
    """Whether torch found no room in /dev/shm, or may not write there."""
    return isinstance(error, RuntimeError) and str(error).startswith(_NO_SHARED_MEMORY)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Around the making of a DataLoader: no warnings, and no worker's death raised out of what the main thread does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns, twice, of more workers than cores, which was asked for
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGCHLD)
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, before)
