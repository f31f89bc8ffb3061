"""Batches made by worker processes, in order, and what is to be said when a worker dies or hangs.

The processes and the way batches travel are torch's DataLoader. Beside it there is a table in shared memory in which
every worker notes what it is working on, so that its death can be laid to a sample.
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

# Batches a worker may have finished or in hand; a worker's share of host memory is that many.
BATCHES_A_WORKER = 2
_POLL_S = 0.5  # how often a `next` that waits looks whether workers are well
_PID, _SAMPLE, _SINCE_NS, _COLUMNS = 0, 1, 2, 3
_REMEDY = "lower num_workers or batch_size if memory ran out, otherwise look at what the data set returns"
_SHARED_REMEDY = (
    "batches from data workers go through /dev/shm: give it more room (of a container, --shm-size 8g), lower "
    "num_workers or batch_size, or set num_workers=0"
)


class Loaded(NamedTuple):
    """A batch, and how long one process worked on it in seconds; or why it cannot be made.

    Attributes:
        fetched: the batch, but for inputs that were left in a slot.
        seconds: of one process.
        refusal: why there is none, in words for the user.
        failure: the traceback of what should not have happened.
        remedy: what the user may do about the failure, as the end of a sentence.
        slot: where the inputs are, `num_inputs` of them.
        rounded: an integer among the inputs that is another number once they are cast.
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
    """What targets must be, and what floating inputs are cast to later; None where nothing is known."""

    classes: Classes | None = None
    dtype: torch.dtype | None = None


_ANYTHING = Needs()


class _Request(NamedTuple):
    """A batch to be made, and the slot for its inputs."""

    keys: list[Key]
    slot: int


class _BatchDataset:
    """What a worker process is given. Items are orders: one for every batch."""

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
        except Exception as error:  # all of it by value: what a DataLoader raises is then about its processes alone
            remedy = _SHARED_REMEDY if says_no_shared_memory(error) else _REMEDY
            return Loaded(None, 0.0, failure=traceback.format_exc(), remedy=remedy)
        finally:
            own[_SINCE_NS] = 0
        seconds = time.perf_counter() - begun
        if out is None:
            return Loaded(fetched, seconds, rounded=rounded)
        return Loaded(fetched, seconds, slot=request.slot, num_inputs=num_inputs)

    def _check_labels(self, keys: list[Key], targets: Tensor) -> None:
        """Raises UserError. Where bad samples were left out, nobody knows which sample has which target."""
        classes = self._needs.classes
        if classes is not None and (found := classes.first_outside(targets)):
            place, label = found
            named = self._data.name_of(keys[place].sample) if len(targets) == len(keys) else "the data set"
            raise UserError(classes.refusal(named, label))


def _share(fetched: Fetched) -> None:
    """Move a batch into shared memory here, where it can be told that there is no room.

    The thread of a queue that would do so later prints a traceback and drops the batch, which then never comes.
    """
    for tensor in (fetched.inputs, fetched.targets):
        tensor.share_memory_()  # type: ignore[no-untyped-call]


class Loader:
    """Makes batches of `data` ahead of whoever asks. One thread calls `next`; `check` may be called by others.

    Args:
        data: what is loaded.
        batches: the keys of one batch after another; may have no end.
        batch_size: no batch is larger.
        seed: of everything random.
        training: see `StreamedData.fetch`.
        num_workers: processes; 0 loads in the caller, when asked.
        pins: put batches into pinned memory, from which copies to a CUDA device do not block.
        needs: what batches are looked at for.
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
        # What the workers have in hand, and the batch that was given last.
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
                collate_fn=_as_it_is,  # type: ignore[arg-type]  # a batch is whole when it comes
                pin_memory=pins,
                timeout=_POLL_S if num_workers else 0,
                prefetch_factor=BATCHES_A_WORKER if num_workers else None,
                multiprocessing_context=start_method() if num_workers else None,
                worker_init_fn=leave_signals_to_the_run,
                generator=torch.Generator(),  # or it would draw from torch's own
            )
            self._batches: Iterator[Loaded] = iter(loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        """The next batch; blocks until it is there.

        Raises:
            StopIteration: after the last.
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
                if time.monotonic() - begun_s < _POLL_S:  # else nothing came in that time, and one goes on waiting
                    raise DataError(f"data workers fail ({one_line(error)}); lower num_workers.") from error
            idle_s = 0.0 if self._notes[:, _SINCE_NS].any() else idle_s + _POLL_S
            if idle_s > self._data.timeout_s:
                raise DataError(
                    f"a batch was lost on its way from a data worker: for {self._data.timeout_s:g} s it did not come, "
                    "and no worker has anything in hand; if it happens again, set num_workers=0."
                )
        raise StopIteration

    def _taken(self, loaded: Loaded) -> Loaded:
        """With the inputs copied out of their slot, which another worker gets next time."""
        if loaded.slot is None or loaded.fetched is None:
            return loaded
        assert self._slots is not None, "a slot is of some"
        inputs = self._slots[loaded.slot, : loaded.num_inputs]
        return loaded._replace(
            fetched=loaded.fetched._replace(inputs=inputs.pin_memory() if self._pins else inputs.clone())
        )

    def check(self) -> None:
        """Raises DataError when a worker is dead or has been longer over one sample than `data.timeout_s`."""
        now_ns = time.monotonic_ns()
        notes = {pid: (self._data.name_of(sample), since_ns) for pid, sample, since_ns in self._notes.tolist() if pid}
        for process in self._processes:
            name, since_ns = notes.get(process.pid or 0, ("no sample yet", 0))
            if not process.is_alive():
                remedy = "look at that sample, or lower num_workers if memory ran out"
                if process.exitcode == -signal.SIGBUS:  # as pages of a shared file for which there is no room
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
        """Let `next` end, also one that waits; from any thread."""
        self._stopped.set()

    def kill(self) -> None:
        """End the processes at once, whatever they are at, so that a blocked `next` fails. Does not raise."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()
                process.join(_POLL_S)

    def close(self) -> None:
        """End the processes; called where `next` is. Does not raise."""
        self._batches = iter(())


def _as_it_is(loaded: Loaded) -> Loaded:
    return loaded


@contextlib.contextmanager
def _killed_unless_started(before: set[BaseProcess]) -> Iterator[None]:
    """Around the start of worker processes. Raises DataError where the system refuses one; none is left then."""
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
    """Let go of a DataLoader's iterator that was being made: what its `__del__` is missing would be printed."""
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
    """The batch. Raises BadDataError where the data set makes none, and DataError for what should not have happened."""
    if loaded.failure:
        last = loaded.failure.strip().splitlines()[-1]
        raise DataError(f"a batch could not be made ({last.rstrip('.')}); {loaded.remedy}.") from RuntimeError(
            loaded.failure
        )
    if loaded.fetched is None:
        raise BadDataError(loaded.refusal)
    return loaded.fetched
