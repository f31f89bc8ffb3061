"""The interface of executors: rounds go in, outcomes come out in order, one round late."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

from crossbow_py.core.errors import CrossbowError, LearnerError
from crossbow_py.engine.bank.layout import Order
from crossbow_py.engine.device.cudnn import searching_libraries
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
    """Runs rounds. Used from one thread; besides the round just submitted, at most one is in flight.

    A round is waited for only after the next one is submitted, so that streams always have work while the caller plans.
    The delay is part of the interface: policies act at the same round with every executor.

    Attributes:
        groups: the groups of learners that run as one.
        running: the tasks that host threads are running, by stream.
        computing: makes a context for work of the calling thread, beside which waits for other ranks cost nothing.
        notes: messages for the user, also from task bodies; take them (`take_all`) after every round.
    """

    NAME: str
    DEVICE: str | None = None  # the only type of device it runs on; None is any
    ORDER: Order | None = None  # the order of rows it needs in the bank; None is the device's default
    FUSES = False  # whether it runs learners in one graph, which is exported from the model
    HAS_ONE_ROW = False  # whether learners that stay equal are one row of the bank
    SPLITS_OPERATORS = True  # whether, on CPUs, it splits operators over torch's threads, which wait for each other
    EXPERIMENTAL = False  # whether `auto` never chooses it

    def __init__(self, tasks: RoundTasks) -> None:
        self.tasks = tasks
        self.groups = self.groups_of(tasks.bank.num_learners)
        sums = tasks.gradient_mean is not None or tasks.bank.one_row  # which also of a single learner steps by the sum
        self.scheduler = Scheduler(len(self.groups), averages_gradients=sums)
        self._in_flight: deque[RoundOutcome] = deque()
        self.running: dict[str, Task] = {}
        idle = tasks.collective.idle
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext if idle is None else idle.computing
        self.notes = tasks.notes
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
        """Add spans to `timeline` for the tasks from the next round on."""
        self._timeline = timeline
        self._spans_between = spans_on(self.tasks.bank.device, timeline)
        self._spans = self._new_spans(timeline, self._spans_between)

    def _new_spans(self, timeline: Timeline, on_callers_stream: TaskSpans) -> TaskSpans:
        """Return the spans of the streams that tasks run on: by default the caller's."""
        return on_callers_stream

    def span(self, name: str, row: str, round_index: int) -> AbstractContextManager[None]:
        """Return a context for work, entered after its waits, that measures it if the executor traces."""
        return nullcontext() if self._spans is None else self._spans.span(name, row, round_index)

    def span_between(self, name: str, round_index: int) -> AbstractContextManager[None]:
        """Return a context that measures averaging by the caller, on its own stream, when nothing is in flight."""
        spans = self._spans_between
        return nullcontext() if spans is None else spans.span(name, AVERAGING_STREAM, round_index)

    def in_effect(self) -> list[str]:
        """Return what rounds run with: `graphs`, and kernels by their names in `core/switches.py`.

        Of convolutions it also says how many directions are the kernel's, of three each.
        """
        return []

    def run_task(
        self, launch: Launch, outcome: RoundOutcome, body: Callable[[RoundOutcome], None] | None = None
    ) -> None:
        """Run a launch in the calling thread, with a span on the launch's stream if the executor traces.

        `body` replaces that of the task. Raises LearnerError if it fails.
        """
        self.running[launch.stream] = launch.task
        try:
            with self.computing(), self.span(launch.task.NAME, launch.stream, launch.task.round_index):
                (body or self._body(launch.task))(outcome)
        except CrossbowError:
            raise
        except Exception as error:
            raise LearnerError(str(launch.task), outcome.plan.index, launch.stream, error) from error
        finally:
            del self.running[launch.stream]

    def _body(self, task: Task) -> Callable[[RoundOutcome], None]:
        return self.tasks.body(task)

    def submit(self, plan: Round, *, wait: bool = True) -> list[RoundOutcome]:
        """Start a round, wait for the one before, and return its outcome (none for the first round after a drain).

        Without `wait` it returns at once: call `collect` before the next round. Raises LearnerError if a task failed.
        """
        outcome = RoundOutcome(plan)
        # With every executor, so that they compare fairly; but each new shape would take seconds.
        searches = self.tasks.bank.device.type == "cuda" and self.tasks.feed.one_shape
        with searching_libraries() if searches else nullcontext():
            self._start(outcome)
        self._in_flight.append(outcome)
        return self._collect(leave=1) if wait else []

    def _launches(self, plan: Round) -> tuple[Launch, ...]:
        """Plan a round's launches, once, for executors whose groups run on several streams."""
        pulls = plan.averaging is not None
        return self.scheduler.round(plan.index, pulls and plan.averages, plan.compares, pulls)

    def collect(self) -> list[RoundOutcome]:
        """Wait for the round before the last one, if it is in flight, and return its outcome.

        Raises LearnerError if a task failed.
        """
        return self._collect(leave=1)

    def is_ready(self) -> bool:
        """Return whether `collect` would not wait. Does not block."""
        return len(self._in_flight) < 2 or self._is_over(self._in_flight[0])

    def settle(self) -> None:
        """Wait for everything in flight. Outcomes and failures still come from `collect` and `drain`."""
        with self.tasks.collective.awaiting():
            self._settle()

    def drain(self) -> list[RoundOutcome]:
        """Wait for everything in flight and return its outcomes; then the caller may read and change the bank."""
        outcomes = self._collect(leave=0)
        with self.tasks.collective.awaiting():
            self._wait_for_z()
        self.scheduler.synchronize()
        for spans in (self._spans, self._spans_between):
            if spans is not None:
                spans.resolve()
        return outcomes

    def recheck(self) -> None:
        """Note if a graph no longer gives the model's own numbers, with nothing in flight; most have no graph."""

    def _collect(self, leave: int) -> list[RoundOutcome]:
        outcomes = []
        while len(self._in_flight) > leave:
            outcome = self._in_flight.popleft()
            with self.tasks.collective.awaiting():
                self._wait(outcome)
            outcomes.append(outcome)
        return outcomes

    @abstractmethod
    def _start(self, outcome: RoundOutcome) -> None:
        """Start, or run, a round's tasks, in the order that `_launches` gives or, with one group, their own."""

    @abstractmethod
    def _wait(self, outcome: RoundOutcome) -> None:
        """Block until the round's outcome is complete; it does not depend on z, so averaging may go on."""

    def _is_over(self, outcome: RoundOutcome) -> bool:
        """Return whether `_wait` would return at once; by default rounds run while they are issued."""
        return True

    def _wait_for_z(self) -> None:
        """Block until averaging is over; called once all outcomes are complete. Raises LearnerError if it failed."""

    def _settle(self) -> None:
        """Block until every task is over. Does not raise."""

    def close(self) -> None:
        """Stop threads, drop tasks that have not started, and release streams. Does not raise."""
