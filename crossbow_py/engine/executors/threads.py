"""CPU executor: a thread a stream, one intra-op thread each, so K small models fill K cores.

PyTorch releases the interpreter lock inside operators and the whole backward pass, so learners really run side by
side. Two intra-op threads on one small batch lose to one: the parallel regions are shorter than their barriers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
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
    """A launch on its way: what to run, what to wait for, and the event that says it is over."""

    launch: Launch
    outcome: RoundOutcome
    after: tuple[threading.Event, ...]
    over: threading.Event


class ThreadsExecutor(Executor):
    """One thread per learner stream and one for the averaging stream.

    The first failure is kept; every task after it is skipped, its event still set, so nothing waits for ever.
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

    def _body(self, task: Task) -> Callable[[RoundOutcome], None] | None:
        """Return what runs a task, where it is not the body that `RoundTasks` has."""
        return None

    def _set_intra_op(self, num_threads: int) -> None:
        """Intra-op threads of the caller, and with them of MKL in every thread: torch has no setting of that for one.

        While learners run it has to be one, or their matrix products would each take all cores (LeNet, K=2 on two
        cores: half the throughput). In between, who evaluates or saves may have them all.
        """
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)

    def drain(self) -> list[RoundOutcome]:
        """See Executor."""
        self.settle()
        outcomes = super().drain()
        self._raise_failure()
        self._set_intra_op(self._num_threads)
        return outcomes

    def _issue(self, launches: tuple[Launch, ...], outcome: RoundOutcome) -> None:
        self._set_intra_op(1)
        index = outcome.plan.index
        previous = {task: event for task, event in self._events.items() if task.round_index < index}
        events = {launch.task: threading.Event() for launch in launches}
        self._events = {**previous, **events}
        for launch in launches:
            after = tuple(self._events[task] for task in launch.after if task in self._events)
            self._queues[launch.stream].put(_Entry(launch, outcome, after, events[launch.task]))
        # Outcomes do not hang on z: a round is over for them once learners are, and averaging may take longer.
        self._last_of_round[index] = [events[launch.task] for launch in launches if launch.stream != AVERAGING_STREAM]

    def _wait(self, outcome: RoundOutcome) -> None:
        for event in self._last_of_round.pop(outcome.plan.index):
            event.wait()
        # Tasks that are over are forgotten; a later task that names one has nothing to wait for.
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
                    self.run_task(entry.launch, entry.outcome, self._body(entry.launch.task))
            except BaseException as error:  # a user's function may even raise SystemExit
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
        """Let running tasks end, drop the rest, and join the threads."""
        with self._failure_lock:
            self._failure = self._failure or CrossbowError("the executor is closed")
        for entries in self._queues.values():
            entries.put(None)
        for thread in self._threads:
            thread.join()
        self._set_intra_op(self._num_threads)
        self._failure = CrossbowError("the executor is closed")  # lets go of what an error's frames hold
