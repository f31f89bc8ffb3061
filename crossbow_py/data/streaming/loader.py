"""Loading batches in order by worker processes, and the errors for a worker that dies or hangs.

Torch's DataLoader starts the processes and moves the batches. Beside it, every worker notes in a table in shared memory
which sample it is loading, so that its death can be traced to a sample.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from crossbow_py.core.errors import BadDataError, DataError, UserError, one_line
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.data.datasets import Classes, Rounded, rounded_integer
from crossbow_py.data.streaming.streamed_data import Fetched, Key, StreamedData
from crossbow_py.data.streaming.worker_processes import (
    leave_signals_to_the_run,
    quiet_start,
    says_no_shared_memory,
    shared_images,
    shared_notes,
    start_method,
)

# Batches a worker may have finished or be loading, each of which takes host memory.
BATCHES_A_WORKER = 2
_POLL_S = 0.5  # seconds between checks of the workers by a waiting `next`
_PID, _SAMPLE, _SINCE_NS, _COLUMNS = 0, 1, 2, 3
_REMEDY = "lower num_workers or batch_size if memory ran out, otherwise look at what the data set returns"
_SHARED_REMEDY = (
    "batches from data workers go through /dev/shm: give it more room (of a container, --shm-size 8g), lower "
    "num_workers or batch_size, or set num_workers=0"
)


class Loaded(NamedTuple):
    """A batch as a worker hands it over, or why it cannot be made.

    Attributes:
        fetched: the batch, without inputs if they were left in a slot.
        seconds: the time that one process spent on it.
        refusal: the user's mistake, for which there is no batch.
        failure: the traceback of an unexpected error.
        remedy: what the user may do about the failure, as the end of a sentence.
        slot: the slot that holds the inputs.
        num_inputs: how many inputs are in the slot.
        rounded: an integer among the inputs that casting rounds.
    """

    fetched: Fetched | None
    seconds: float
    refusal: str = ""
    failure: str = ""
    remedy: str = _REMEDY
    slot: int | None = None
    num_inputs: int = 0
    rounded: Rounded | None = None


class Needs(NamedTuple):
    """The classes that targets must be of, and the dtype that floating inputs are cast to; None for no check."""

    classes: Classes | None = None
    dtype: torch.dtype | None = None


_ANYTHING = Needs()


class _Request(NamedTuple):
    """A batch to be loaded, and the slot for its inputs."""

    keys: list[Key]
    slot: int


class _BatchDataset:
    """The data set that a worker process is given, for a DataLoader: an index is a request, an item a whole batch."""

    def __init__(
        self,
        data: StreamedData,
        seed: int,
        training: bool,
        notes: Tensor,
        slots: Tensor | None,
        needs: Needs,
    ) -> None:
        self._data, self._seed, self._training = data, seed, training
        self._notes, self._slots, self._needs = notes, slots, needs

    def __getitems__(self, request: _Request) -> Loaded:
        worker = get_worker_info()
        own = self._notes[0 if worker is None else worker.id].numpy()

        def on_sample(sample: int) -> None:
            own[_SAMPLE], own[_SINCE_NS] = sample, time.monotonic_ns()

        begun = time.perf_counter()
        own[_PID], own[_SINCE_NS] = os.getpid(), time.monotonic_ns()
        try:
            out = None if self._slots is None else self._slots[request.slot]
            fetched = self._data.fetch(
                request.keys, seed=self._seed, training=self._training, on_sample=on_sample, out=out
            )
            self._check_labels(request.keys, fetched.targets)
            rounded = None if self._needs.dtype is None else rounded_integer(fetched.inputs, self._needs.dtype)
            num_inputs = len(fetched.inputs)
            if out is not None:
                fetched = fetched._replace(inputs=torch.empty(0))
            if worker is not None:
                _share(fetched)
        except UserError as error:
            return Loaded(None, 0.0, str(error))
        except Exception as error:  # returned as a value, so that what a DataLoader raises is about its processes only
            remedy = _SHARED_REMEDY if says_no_shared_memory(error) else _REMEDY
            return Loaded(None, 0.0, failure=traceback.format_exc(), remedy=remedy)
        finally:
            own[_SINCE_NS] = 0
        seconds = time.perf_counter() - begun
        if out is None:
            return Loaded(fetched, seconds, rounded=rounded)
        return Loaded(fetched, seconds, slot=request.slot, num_inputs=num_inputs)

    def _check_labels(self, keys: list[Key], targets: Tensor) -> None:
        """Raise UserError for a target that is no class. If bad samples were left out, its sample is unknown."""
        classes = self._needs.classes
        if classes is not None and (found := classes.first_outside(targets)):
            index, label = found
            named = self._data.name_of(keys[index].sample) if len(targets) == len(keys) else "the data set"
            raise UserError(classes.refusal(named, label))


def _share(fetched: Fetched) -> None:
    """Move a batch into shared memory here, where a lack of room can be reported.

    The queue's thread, which would do so later, prints a traceback and drops the batch, which then never arrives.
    """
    for tensor in (fetched.inputs, fetched.targets):
        tensor.share_memory_()  # type: ignore[no-untyped-call]


class Loader:
    """An iterator over batches of `data`, loaded ahead. One thread calls `next`; others may call `check`.

    Args:
        data: the data set.
        batches: the keys of each batch; may have no end.
        batch_size: the largest size of a batch.
        seed: seed of everything random.
        training: see `StreamedData.fetch`.
        num_workers: processes; 0 loads in the caller, when asked.
        pins: put batches into pinned memory, from which copies to a CUDA device do not block.
        needs: what batches are checked for.
    """

    def __init__(
        self,
        data: StreamedData,
        batches: Iterable[list[Key]],
        *,
        batch_size: int,
        seed: int,
        training: bool,
        num_workers: int,
        pins: bool,
        needs: Needs = _ANYTHING,
    ) -> None:
        self._data, self.num_workers, self._pins = data, num_workers, pins
        self._stopped = threading.Event()
        # For the batches of the workers, and the one that was returned last.
        num_slots = BATCHES_A_WORKER * num_workers + 2
        requests = map(_Request, batches, itertools.cycle(range(num_slots)))
        shape = data.image_shape if num_workers else None
        before = set(multiprocessing.active_children())
        with _killed_unless_started(before), quiet_start():
            self._slots = None if shape is None else shared_images(num_slots, batch_size, shape)
            self._notes = shared_notes(num_workers, _COLUMNS)
            loader: DataLoader[Any] = DataLoader(
                _BatchDataset(data, seed, training, self._notes, self._slots, needs),  # type: ignore[arg-type]  # no single items
                batch_sampler=requests,  # type: ignore[arg-type]  # requests, not lists of indices
                num_workers=num_workers,
                collate_fn=_as_it_is,  # type: ignore[arg-type]  # an item is a whole batch
                pin_memory=pins,
                timeout=_POLL_S if num_workers else 0,
                prefetch_factor=BATCHES_A_WORKER if num_workers else None,
                multiprocessing_context=start_method() if num_workers else None,
                worker_init_fn=leave_signals_to_the_run,
                generator=torch.Generator(),  # else it would draw from torch's own
            )
            self._batches: Iterator[Loaded] = iter(loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        """Return the next batch; blocks until it is there.

        Raises:
            StopIteration: after the last batch.
            DataError: a worker died or hangs, or a batch was lost.
        """
        if not self.num_workers:
            with kept_generators():
                return next(self._batches)
        idle_s = 0.0
        while not self._stopped.is_set():
            begun_s = time.monotonic()
            try:
                return self._taken(next(self._batches))
            except (RuntimeError, OSError) as error:
                self.check()
                if time.monotonic() - begun_s < _POLL_S:  # else it only timed out
                    raise DataError(f"data workers fail ({one_line(error)}); lower num_workers.") from error
            idle_s = 0.0 if self._notes[:, _SINCE_NS].any() else idle_s + _POLL_S
            if idle_s > self._data.timeout_s:
                raise DataError(
                    f"a batch was lost on its way from a data worker: it did not arrive for {self._data.timeout_s:g} "
                    "s, and no worker is loading one; if it happens again, set num_workers=0."
                )
        raise StopIteration

    def _taken(self, loaded: Loaded) -> Loaded:
        """Copy the inputs out of their slot, which a worker overwrites later."""
        if loaded.slot is None or loaded.fetched is None:
            return loaded
        assert self._slots is not None, "there are slots if a batch is in one"
        inputs = self._slots[loaded.slot, : loaded.num_inputs]
        return loaded._replace(
            fetched=loaded.fetched._replace(inputs=inputs.pin_memory() if self._pins else inputs.clone())
        )

    def check(self) -> None:
        """Raise DataError if a worker is dead, or has been loading one sample for longer than `data.timeout_s`."""
        now_ns = time.monotonic_ns()
        notes = {pid: (self._data.name_of(sample), since_ns) for pid, sample, since_ns in self._notes.tolist() if pid}
        for process in self._processes:
            name, since_ns = notes.get(process.pid or 0, ("no sample yet", 0))
            if not process.is_alive():
                remedy = "look at that sample, or lower num_workers if memory ran out"
                if process.exitcode == -signal.SIGBUS:  # a page of a shared file for which /dev/shm has no room
                    remedy = _SHARED_REMEDY
                raise DataError(
                    f"data worker {process.pid} died ({_end_of(process.exitcode)}) and was last on {name}; {remedy}."
                )
            if since_ns and now_ns - since_ns > self._data.timeout_s * 1e9:
                raise DataError(
                    f"data worker {process.pid} has hung for {self._data.timeout_s:g} s on {name}; look at that sample "
                    f"and where it is read from{self._data.patience_remedy}."
                )

    def stop(self) -> None:
        """Let `next` end, even while it waits; from any thread."""
        self._stopped.set()

    def kill(self) -> None:
        """Kill the processes, so that a blocked `next` fails. Does not raise."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()
                process.join(_POLL_S)

    def close(self) -> None:
        """End the processes; called by the thread that calls `next`. Does not raise."""
        self._batches = iter(())


def _as_it_is(loaded: Loaded) -> Loaded:
    return loaded


@contextlib.contextmanager
def _killed_unless_started(before: set[BaseProcess]) -> Iterator[None]:
    """Start worker processes in this block. Raises DataError if the system refuses one, and kills the others."""
    try:
        yield
    except OSError as error:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
            child.join()
        _drop_half_made(error)
        raise DataError(
            f"data workers cannot be started ({one_line(error)}); lower num_workers if there are too many processes or "
            "open files, make /dev/shm writable if it is not, or set num_workers=0."
        ) from error


def _drop_half_made(error: OSError) -> None:
    """Free a DataLoader's half-made iterator, whose `__del__` would print an error for its missing attributes."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        traceback.clear_frames(error.__traceback__)
    finally:
        sys.unraisablehook = hook


def _end_of(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def fetched_or_raise(loaded: Loaded) -> Fetched:
    """Return the batch. Raises BadDataError if the data set makes none, DataError for an unexpected failure."""
    if loaded.failure:
        last = loaded.failure.strip().splitlines()[-1]
        raise DataError(f"a batch could not be made ({last.rstrip('.')}); {loaded.remedy}.") from RuntimeError(
            loaded.failure
        )
    if loaded.fetched is None:
        raise BadDataError(loaded.refusal)
    return loaded.fetched
