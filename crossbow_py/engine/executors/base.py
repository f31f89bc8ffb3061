"""What every executor promises: rounds go in, outcomes come out in order, one round late."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

from crossbow_py.engine.bank.layout import Order
from crossbow_py.engine.executors.spans import TaskSpans, spans_on
from crossbow_py.engine.rounds import Round, RoundOutcome, RoundTasks
from crossbow_py.engine.scheduler import AVERAGING_STREAM, Launch, Scheduler
from crossbow_py.engine.tasks import Task
from crossbow_py.telemetry.timeline import Timeline


def even_groups(num_learners: int, num_groups: int) -> list[range]:
    """Return neighbouring learners in groups as even as possible, larger ones first; no more groups than learners."""
    groups = min(num_learners, num_groups)
    small, larger = divmod(num_learners, groups)
    starts = [j * small + min(j, larger) for j in range(groups + 1)]
    return [range(first, end) for first, end in pairwise(starts)]


class Executor(ABC):
    """Runs rounds. Used from one thread; `submit` keeps at most one round in flight behind the one submitted.

    A round is polled only after the next one is submitted, so streams never run dry while the caller plans; the
    delay is part of the contract, so that policies act at the same round whatever the executor.
    """

    NAME: str
    DEVICE: str | None = None  # the only type of device it runs on; None is any
    ORDER: Order | None = None  # of the bank it wants; None leaves it to the device
    FUSES = False  # learners into one graph, which is exported and not the model itself
    SPLITS_OPERATORS = True  # on CPUs over torch's threads, which then wait for each other
    EXPERIMENTAL = False  # asked for by name alone, never taken by `auto`

    def __init__(self, tasks: RoundTasks) -> None:
        self.tasks = tasks
        self.groups = self.groups_of(tasks.bank.num_learners)
        self.scheduler = Scheduler(len(self.groups), averages_gradients=tasks.gradient_mean is not None)
        self._in_flight: deque[RoundOutcome] = deque()
        self.running: dict[str, Task] = {}  # what host threads are at, by stream
        self.notes = tasks.notes  # sentences for the user, also of task bodies; `taken` after every round
        self._timeline: Timeline | None = None
        self._spans: TaskSpans | None = None
        self._spans_between: TaskSpans | None = None

    @classmethod
    def groups_of(cls, num_learners: int) -> list[range]:
        """Return the groups of learners, or of models to predict with, that run as one; by default each is alone.

        A group takes the place of a learner in tasks and streams.
        """
        return even_groups(num_learners, num_learners)

    def trace(self, timeline: Timeline) -> None:
        """Add a span to `timeline` for what runs from the next round on."""
        self._timeline = timeline
        self._spans_between = spans_on(self.tasks.bank.device, timeline)
        self._spans = self._new_spans(timeline, self._spans_between)

    def _new_spans(self, timeline: Timeline, on_callers_stream: TaskSpans) -> TaskSpans:
        """Of the streams that tasks run on: by default the caller's."""
        return on_callers_stream

    def span(self, name: str, row: str, round_index: int) -> AbstractContextManager[None]:
        """Around work as it runs, after what it waits for: measured when the executor traces, else nothing."""
        return nullcontext() if self._spans is None else self._spans.span(name, row, round_index)

    def span_between(self, name: str, round_index: int) -> AbstractContextManager[None]:
        """Around averaging that the caller does when nothing is in flight, on its own stream."""
        spans = self._spans_between
        return nullcontext() if spans is None else spans.span(name, AVERAGING_STREAM, round_index)

    def run_task(
        self, launch: Launch, outcome: RoundOutcome, body: Callable[[RoundOutcome], None] | None = None
    ) -> None:
        """Run a launch's body in the calling thread, as a span on the launch's stream when the executor traces.

        `body` is for an executor with another body than that of `RoundTasks`.
        """
        self.running[launch.stream] = launch.task
        try:
            with self.span(launch.task.NAME, launch.stream, launch.task.round_index):
                (body or self.tasks.body(launch.task))(outcome)
        finally:
            del self.running[launch.stream]

    def submit(self, plan: Round) -> list[RoundOutcome]:
        """Issue a round; wait for the one before and return its outcome (none for the first after a drain).

        Raises LearnerError when a task failed.
        """
        self.issue(plan)
        return self.collect()

    def issue(self, plan: Round) -> None:
        """Issue a round without waiting; `collect` before the next. Raises LearnerError when a task failed."""
        outcome = RoundOutcome(plan)
        self._issue(self.scheduler.round(plan.index, plan.averaging is not None), outcome)
        self._in_flight.append(outcome)

    def collect(self) -> list[RoundOutcome]:
        """Wait for the round before the one issued last, and return its outcome, if there is one to come.

        Raises LearnerError when a task failed.
        """
        return self._collect(leave=1)

    def is_ready(self) -> bool:
        """Whether `collect` has nothing to wait for. Does not block."""
        return len(self._in_flight) < 2 or self._is_over(self._in_flight[0])

    def settle(self) -> None:
        """Wait for what is in flight, whose outcomes still come when they would have come. Failures come with them."""
        with self.tasks.collective.awaiting():
            self._settle()

    def drain(self) -> list[RoundOutcome]:
        """Wait for everything in flight; afterwards the bank may be read and changed by the caller."""
        outcomes = self._collect(leave=0)
        with self.tasks.collective.awaiting():
            self._wait_for_z()
        self.scheduler.synchronize()
        for spans in (self._spans, self._spans_between):
            if spans is not None:
                spans.resolve()
        return outcomes

    def recheck(self) -> None:
        """Note where what runs no longer gives the model's own numbers; nothing is in flight. Most run the model."""

    def _collect(self, leave: int) -> list[RoundOutcome]:
        outcomes = []
        while len(self._in_flight) > leave:
            outcome = self._in_flight.popleft()
            with self.tasks.collective.awaiting():
                self._wait(outcome)
            outcomes.append(outcome)
        return outcomes

    @abstractmethod
    def _issue(self, launches: tuple[Launch, ...], outcome: RoundOutcome) -> None:
        """Start a round's tasks, or run them."""

    @abstractmethod
    def _wait(self, outcome: RoundOutcome) -> None:
        """Block until the round's last task is over; outcomes do not hang on z, so averaging may go on."""

    def _is_over(self, outcome: RoundOutcome) -> bool:
        """Whether `_wait` would return at once: by default it would, as where rounds run while they are issued."""
        return True

    def _wait_for_z(self) -> None:
        """Block until averaging is over, once all outcomes have come. Raises LearnerError when it failed."""

    def _settle(self) -> None:
        """Block until every task is over. Does not raise."""

    def close(self) -> None:
        """Stop threads and release streams. Does not raise; tasks not yet started are dropped."""
