"""Loading batches in order by worker processes, and the errors for a worker that dies or hangs.

Torch's DataLoader starts the processes and moves the batches. Beside it, every worker notes in a table in shared memory
which sample it is loading, so that its death can be traced to a sample.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from crossbow_py.core.errors import BadDataError, DataError, UserError, one_line
from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.core.trees import leaves
from crossbow_py.data.datasets import Classes
from crossbow_py.data.normalisation import digits_lost
from crossbow_py.data.streaming.streamed_data import Key, Loaded, StreamedData
from crossbow_py.data.streaming.worker_processes import (
    says_no_shared_memory,
    shared_images,
    shared_notes,
    start_workers,
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


class _Failed(NamedTuple):
    """A batch that could not be loaded: the user's mistake, or an unexpected error and its traceback."""

    message: str
    trace: str = ""


@dataclass(frozen=True)
class _BatchDataset:
    """The data set of a worker's DataLoader: an index is a batch's keys and its inputs' slot, an item the batch."""

    data: StreamedData
    seed: int
    training: bool
    notes: Tensor
    slots: Tensor | None
    classes: Classes | None
    casts_to: torch.dtype | None

    def __getitems__(self, request: tuple[list[Key], int]) -> tuple[int, Loaded | _Failed]:
        keys, slot = request
        return slot, self._load(keys, slot)

    def _load(self, keys: list[Key], slot: int) -> Loaded | _Failed:
        worker = get_worker_info()
        own = self.notes[0 if worker is None else worker.id].numpy()

        def on_sample(sample: int) -> None:
            own[_SAMPLE], own[_SINCE_NS] = sample, time.monotonic_ns()

        begun = time.perf_counter()
        own[_PID], own[_SINCE_NS] = os.getpid(), time.monotonic_ns()
        try:
            out = None if self.slots is None else self.slots[slot]
            loaded = self.data.fetch(keys, seed=self.seed, training=self.training, on_sample=on_sample, out=out)
            self._check_labels(keys, loaded.targets)
            cast = self.casts_to
            rounded = None if cast is None else digits_lost(loaded.inputs, loaded.targets, cast)
            if out is not None:  # the loader takes them from the slot
                loaded = loaded._replace(inputs=torch.empty(0))
            if worker is not None:
                # A lack of room in shared memory can be reported here. The queue's thread, which would move the tensors
                # there later, prints a traceback and drops the batch, which then never arrives.
                for tensor in leaves((loaded.inputs, loaded.targets)):
                    tensor.share_memory_()  # type: ignore[no-untyped-call]
            return loaded._replace(seconds=time.perf_counter() - begun, rounded=rounded)
        except UserError as error:
            return _Failed(str(error))
        except Exception as error:  # returned as a value, so that what a DataLoader raises is about its processes only
            remedy, trace = _SHARED_REMEDY if says_no_shared_memory(error) else _REMEDY, traceback.format_exc()
            last = trace.strip().splitlines()[-1].rstrip(".")
            return _Failed(f"a batch could not be made ({last}); {remedy}.", trace)
        finally:
            own[_SINCE_NS] = 0

    def _check_labels(self, keys: list[Key], targets: Tensor) -> None:
        """Raise UserError for a target that is no class. If bad samples were left out, its sample is unknown."""
        if self.classes is not None and (found := self.classes.first_outside(targets)):
            index, label = found
            named = self.data.name_of(keys[index].sample) if len(targets) == len(keys) else "the data set"
            raise UserError(self.classes.refusal(named, label))


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
        classes: the classes that targets must be of; None for no check.
        casts_to: the dtype that floating inputs are cast to; None for no search for integers that it rounds.
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
        classes: Classes | None = None,
        casts_to: torch.dtype | None = None,
    ) -> None:
        self._data, self.num_workers, self._pins = data, num_workers, pins
        self._stopped = threading.Event()
        # For the batches of the workers, and the one that was returned last.
        num_slots = BATCHES_A_WORKER * num_workers + 2
        shape = data.image_shape if num_workers else None
        try:
            self._slots = None if shape is None else shared_images(num_slots, batch_size, shape)
            self._notes = shared_notes(num_workers, _COLUMNS)
            self._batches, self._processes = start_workers(
                _BatchDataset(data, seed, training, self._notes, self._slots, classes, casts_to),
                num_workers,
                _POLL_S,
                batch_sampler=zip(batches, itertools.cycle(range(num_slots)), strict=False),
                pin_memory=pins,
                prefetch_factor=BATCHES_A_WORKER if num_workers else None,
            )
        except OSError as error:
            remedy = "lower num_workers, make /dev/shm writable if it is not, or set num_workers=0"
            raise DataError(f"data workers cannot be started ({one_line(error)}); {remedy}.") from error

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        """Return the next batch; blocks until it is there.

        Raises:
            StopIteration: after the last batch.
            BadDataError: the data set makes no batch.
            DataError: an unexpected error, a worker died or hangs, or a batch was lost.
        """
        if not self.num_workers:
            with kept_generators():
                return self._received(*next(self._batches))
        idle_s = 0.0
        while not self._stopped.is_set():
            begun_s = time.monotonic()
            try:
                return self._received(*next(self._batches))
            except (RuntimeError, OSError, EOFError) as error:
                is_broken = time.monotonic() - begun_s < _POLL_S  # else it only timed out
                if is_broken:  # mostly by a worker whose end is seen a moment later
                    ending = wait([process.sentinel for process in self._processes], timeout=5)
                    for process in self._processes:
                        process.join(1 if process.sentinel in ending else 0)
                self.check()
                if is_broken:
                    raise DataError(f"data workers fail ({one_line(error)}); lower num_workers.") from error
            idle_s = 0.0 if self._notes[:, _SINCE_NS].any() else idle_s + _POLL_S
            if idle_s > self._data.timeout_s:
                lost = f"from a data worker: it did not arrive for {self._data.timeout_s:g} s, and none is loading one"
                raise DataError(f"a batch was lost on its way {lost}; if it happens again, set num_workers=0.")
        raise StopIteration

    def _received(self, slot: int, result: Loaded | _Failed) -> Loaded:
        """Raise a worker's failure, or copy the inputs out of their slot, which a worker overwrites later."""
        if isinstance(result, _Failed):
            if result.trace:
                raise DataError(result.message) from RuntimeError(result.trace)
            raise BadDataError(result.message)
        if self._slots is None:
            return result
        inputs = self._slots[slot, : len(result.targets)]
        return result._replace(inputs=inputs.pin_memory() if self._pins else inputs.clone())

    def check(self) -> None:
        """Raise DataError if a worker is dead, or has been loading one sample for longer than `data.timeout_s`."""
        now_ns = time.monotonic_ns()
        notes = {pid: (self._data.name_of(sample), since_ns) for pid, sample, since_ns in self._notes.tolist() if pid}
        for process in self._processes:
            name, since_ns = notes.get(process.pid or 0, ("no sample yet", 0))
            if not process.is_alive():
                code, remedy = process.exitcode or 0, "look at that sample, or lower num_workers if memory ran out"
                ended = f"killed by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                if code == -signal.SIGBUS:  # a page of a shared file for which /dev/shm has no room
                    remedy = _SHARED_REMEDY
                raise DataError(f"data worker {process.pid} died ({ended}) and was last on {name}; {remedy}.")
            if since_ns and now_ns - since_ns > self._data.timeout_s * 1e9:
                remedy = f"look at that sample and where it is read from{self._data.patience_remedy}"
                hangs = f"data worker {process.pid} has hung for {self._data.timeout_s:g} s on {name}"
                raise DataError(f"{hangs}; {remedy}.")

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
