"""Batches made by worker processes, in order, and what is to be said when a worker dies or hangs.

The processes and the way batches travel are torch's DataLoader. Beside it there is a table in shared memory in which
every worker notes what it is working on, so that its death can be laid to a sample.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from crossbow_py.data.host_randomness import kept_generators
from crossbow_py.data.streamed import Fetched, Key, StreamedData
from crossbow_py.data.worker_processes import kept_child_handler, leave_signals_to_the_run, start_method
from crossbow_py.errors import DataError, UserError

# Batches a worker may have finished or in hand; a worker's share of host memory is that many.
BATCHES_A_WORKER = 2
_PID, _SAMPLE, _SINCE_NS, _COLUMNS = 0, 1, 2, 3


class Loaded(NamedTuple):
    """A batch, and how long one process worked on it in seconds; or why it cannot be made, in words for the user."""

    fetched: Fetched | None
    seconds: float
    refusal: str = ""


class _Workshop:
    """What a worker process is given. Items are lists of keys: one for every batch."""

    def __init__(self, data: StreamedData, seed: int, training: bool, notes: Tensor) -> None:
        self._data, self._seed, self._training, self._notes = data, seed, training, notes

    def __getitems__(self, keys: list[Key]) -> Loaded:
        worker = get_worker_info()
        own = self._notes[0 if worker is None else worker.id].numpy()

        def on_sample(sample: int) -> None:
            own[_SAMPLE] = sample

        begun = time.perf_counter()
        own[_PID], own[_SINCE_NS] = os.getpid(), time.monotonic_ns()
        try:
            fetched = self._data.fetch(keys, seed=self._seed, training=self._training, on_sample=on_sample)
        except UserError as error:
            return Loaded(None, 0.0, str(error))
        finally:
            own[_SINCE_NS] = 0
        return Loaded(fetched, time.perf_counter() - begun)


class Loader:
    """Makes batches of `data` ahead of whoever asks. One thread calls `next`; `check` may be called by others.

    Args:
        data: what is loaded.
        batches: the keys of one batch after another; may have no end.
        seed: of everything random.
        training: see `StreamedData.fetch`.
        num_workers: processes; 0 loads in the caller, when asked.
        pins: put batches into pinned memory, from which copies to a CUDA device do not block.
    """

    def __init__(
        self,
        data: StreamedData,
        batches: Iterable[list[Key]],
        *,
        seed: int,
        training: bool,
        num_workers: int,
        pins: bool,
    ) -> None:
        self._data, self.num_workers = data, num_workers
        self._notes = torch.zeros(max(1, num_workers), _COLUMNS, dtype=torch.int64)
        self._notes.share_memory_()  # type: ignore[no-untyped-call]
        loader: DataLoader[Any] = DataLoader(
            _Workshop(data, seed, training, self._notes),  # type: ignore[arg-type]  # has no use for single items
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type]  # a batch is whole when it comes
            pin_memory=pins,
            prefetch_factor=BATCHES_A_WORKER if num_workers else None,
            multiprocessing_context=start_method() if num_workers else None,
            worker_init_fn=leave_signals_to_the_run,
            generator=torch.Generator(),  # or it would draw from torch's own
        )
        before = set(multiprocessing.active_children())
        with kept_child_handler():
            self._batches: Iterator[Loaded] = iter(loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        """The next batch; blocks until it is there.

        Raises:
            StopIteration: after the last.
            DataError: a worker died.
        """
        if not self.num_workers:
            with kept_generators():
                return next(self._batches)
        try:
            return next(self._batches)
        except RuntimeError:
            self.check()
            raise

    def check(self) -> None:
        """Raises DataError when a worker is dead or has been longer over one batch than `data.timeout_s`."""
        now_ns = time.monotonic_ns()
        for pid, sample, since_ns in self._notes.tolist():
            process = next((one for one in self._processes if one.pid == pid), None)
            if process is None:
                continue
            if not process.is_alive():
                raise DataError(
                    f"data worker {pid} died ({_end_of(process.exitcode)}) and was last on "
                    f"{self._data.name_of(sample)}; look at that sample, or lower num_workers if memory ran out."
                )
            if since_ns and now_ns - since_ns > self._data.timeout_s * 1e9:
                raise DataError(
                    f"data worker {pid} has hung for {self._data.timeout_s:g} s on {self._data.name_of(sample)}; look "
                    "at that sample and where it is read from, or allow more by data.worker_timeout_s."
                )

    def kill(self) -> None:
        """End the processes at once, whatever they are at, so that a blocked `next` fails. Does not raise."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()

    def close(self) -> None:
        """End the processes; called where `next` is. Does not raise."""
        self._batches = iter(())


def _as_it_is(loaded: Loaded) -> Loaded:
    return loaded


def _end_of(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def fetched_or_raise(loaded: Loaded) -> Fetched:
    """The batch. Raises UserError where it cannot be made."""
    if loaded.fetched is None:
        raise UserError(loaded.refusal)
    return loaded.fetched
