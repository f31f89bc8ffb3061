"""Starting worker processes, and the memory they share with the run."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

# The beginnings of torch's errors about files in /dev/shm: plain RuntimeErrors, which only their text tells apart.
_NO_SHARED_MEMORY = ("unable to open shared memory", "unable to allocate shared memory", "unable to resize file")


def start_method() -> str | None:
    """Return "fork" where it is usual: workers then start at once, and data sets need not be pickled. Else None."""
    return "fork" if "fork" in multiprocessing.get_all_start_methods() and os.name == "posix" else None


def start_workers(
    dataset: Any, num_workers: int, timeout_s: float, **options: Any
) -> tuple[Iterator[Any], list[BaseProcess]]:
    """Start a DataLoader. Return its iterator over what `dataset` gives, unchanged, and its processes.

    A worker that takes longer than `timeout_s` is a RuntimeError. Without workers the caller loads. `options` are the
    DataLoader's. Raises OSError if the system refuses a process; the others are killed.
    """
    before = set(multiprocessing.active_children())
    try:
        with _quiet_start():
            batches = iter(
                DataLoader(
                    dataset,
                    num_workers=num_workers,
                    collate_fn=_as_it_is,
                    timeout=timeout_s if num_workers else 0,
                    multiprocessing_context=start_method() if num_workers else None,
                    worker_init_fn=_leave_signals_to_the_run,
                    generator=torch.Generator(),  # else it would draw from torch's own
                    **options,
                )
            )
    except OSError as error:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
            child.join()
        # Frees the half-made iterator here, as its `__del__` prints an error for its missing attributes.
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            traceback.clear_frames(error.__traceback__)
        finally:
            sys.unraisablehook = hook
        raise
    return batches, [child for child in multiprocessing.active_children() if child not in before]


def _as_it_is(item: Any) -> Any:
    return item


def _leave_signals_to_the_run(_: int) -> None:
    # Every process gets Ctrl-C, and the run ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def shared_images(count: int, batch_size: int, shape: tuple[int, int, int]) -> Tensor | None:
    """Return uint8 [count, batch_size, C, H, W], channels last, shared with forked processes; None where none fork.

    It is anonymous memory and takes no room in /dev/shm, which is small in containers. Its pages are faulted in once;
    new memory for every batch would fault each time (measured: 8 to 13 ms for 4.8 MB, 0.2 ms within one process).
    """
    if start_method() is None:
        return None
    channels, height, width = shape
    memory = mmap.mmap(-1, count * batch_size * channels * height * width)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    return values.view(count, batch_size, height, width, channels).permute(0, 1, 4, 2, 3)


def shared_notes(num_workers: int, columns: int) -> Tensor:
    """Return zeros int64 [max(1, num_workers), columns] shared with workers; not in /dev/shm where they are forked."""
    shape = (max(1, num_workers), columns)
    if start_method() is None:
        return torch.zeros(shape, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call,no-any-return]
    return torch.frombuffer(mmap.mmap(-1, 8 * shape[0] * shape[1]), dtype=torch.int64).view(shape)


def says_no_shared_memory(error: BaseException) -> bool:
    """Return whether torch found no room in /dev/shm, or may not write there."""
    return isinstance(error, RuntimeError) and str(error).startswith(_NO_SHARED_MEMORY)


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Make a DataLoader in this block: its warnings are hidden, and its SIGCHLD handler, which raises, is removed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns twice of more workers than cores, which the user asked for
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGCHLD)
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, before)
