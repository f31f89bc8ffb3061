"""The CPU executor `threads`: a thread for each stream, with one intra-op thread, so that K small models use K cores.

PyTorch releases the interpreter lock inside operators and in the whole backward pass, so learners run side by side. On
one small batch two intra-op threads are slower than one, as the parallel regions are shorter than their barriers.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import torch

from crossbow_py.core.errors import CrossbowError, LearnerError
from crossbow_py.engine.device.host import flush_denormals, keep_freed_memory
from crossbow_py.engine.executors.base import Executor
from crossbow_py.engine.rounds import RoundOutcome, RoundTasks
from crossbow_py.engine.scheduler import AVERAGING_STREAM, Launch, learner_stream
from crossbow_py.engine.tasks import Task


@dataclass(frozen=True)
class _Entry:
    """A queued launch, the events it waits for, and the event that is set when it is over."""

    launch: Launch
    outcome: RoundOutcome
    after: tuple[threading.Event, ...]
    over: threading.Event


class ThreadsExecutor(Executor):
    """Runs each learner's stream, and the averaging stream, on a thread of its own.

    The first failure is kept. Later tasks are skipped, and their events set, so that nothing waits for ever.
    """

    NAME = "threads"
    DEVICE = "cpu"
    SPLITS_OPERATORS = False

    def __init__(self, tasks: RoundTasks) -> None:
        super().__init__(tasks)
        keep_freed_memory()
        self._failure: CrossbowError | None = None
        self._failure_lock = threading.Lock()
        self._events: dict[Task, threading.Event] = {}
        self._last_of_round: dict[int, list[threading.Event]] = {}
        streams = [learner_stream(j) for j in range(len(self.groups))] + [AVERAGING_STREAM]
        self._queues: dict[str, queue.SimpleQueue[_Entry | None]] = {name: queue.SimpleQueue() for name in streams}
        self._threads = [
            threading.Thread(target=self._serve, args=(entries,), name=f"crossbow {name}", daemon=True)
            for name, entries in self._queues.items()
        ]
        self._num_threads, self._started = torch.get_num_threads(), threading.Barrier(len(streams) + 1)
        for thread in self._threads:
            thread.start()
        self._started.wait()
        self._set_intra_op(self._num_threads)

    def _set_intra_op(self, num_threads: int) -> None:
        """Set the caller's number of intra-op threads, which MKL uses in every thread: torch cannot set it for one.

        While learners run it must be one, or each of their matrix products would use all cores (LeNet, K=2 on two
        cores: half the throughput). In between, evaluating and saving may use all of them.
        """
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)

    def drain(self) -> list[RoundOutcome]:
        self.settle()
        outcomes = super().drain()
        self._raise_failure()
        self._set_intra_op(self._num_threads)
        return outcomes

    def _start(self, outcome: RoundOutcome) -> None:
        self._set_intra_op(1)
        launches, index = self._launches(outcome.plan), outcome.plan.index
        previous = {task: event for task, event in self._events.items() if task.round_index < index}
        events = {launch.task: threading.Event() for launch in launches}
        self._events = {**previous, **events}
        for launch in launches:
            after = tuple(self._events[task] for task in launch.after if task in self._events)
            self._queues[launch.stream].put(_Entry(launch, outcome, after, events[launch.task]))
        # Outcomes do not depend on z: they are complete once the learners' tasks are over.
        self._last_of_round[index] = [events[launch.task] for launch in launches if launch.stream != AVERAGING_STREAM]

    def _wait(self, outcome: RoundOutcome) -> None:
        for event in self._last_of_round.pop(outcome.plan.index):
            event.wait()
        # Tasks that are over are dropped: a later task that depends on one has nothing to wait for.
        self._events = {task: event for task, event in self._events.items() if not event.is_set()}
        self._raise_failure()

    def _is_over(self, outcome: RoundOutcome) -> bool:
        return all(event.is_set() for event in self._last_of_round[outcome.plan.index])

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def _settle(self) -> None:
        for event in self._events.values():
            event.wait()

    def _serve(self, entries: queue.SimpleQueue[_Entry | None]) -> None:
        torch.set_num_threads(1)
        flush_denormals()
        self._started.wait()
        while (entry := entries.get()) is not None:
            for event in entry.after:
                event.wait()
            try:
                if self._failure is None:
                    self.run_task(entry.launch, entry.outcome)
            except BaseException as error:  # a user's function may raise SystemExit
                self._fail(entry, error)
            finally:
                entry.over.set()
            del entry

    def _fail(self, entry: _Entry, error: BaseException) -> None:
        failure = error if isinstance(error, CrossbowError) else None
        if failure is None:
            failure = LearnerError(str(entry.launch.task), entry.outcome.plan.index, entry.launch.stream, error)
            failure.__cause__ = error
        with self._failure_lock:
            self._failure = self._failure or failure

    def close(self) -> None:
        with self._failure_lock:
            self._failure = self._failure or CrossbowError("the executor is closed")
        for entries in self._queues.values():
            entries.put(None)
        for thread in self._threads:
            thread.join()
        self._set_intra_op(self._num_threads)
        self._failure = CrossbowError("the executor is closed")  # frees what an error's frames hold
