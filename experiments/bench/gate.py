"""The gate a side's training loop passes at every tick: it lets the loop run for a window, measures it, and holds it.

A side trains on and on and knows nothing of windows; between them it is blocked here, inside its own process, so it
takes no processor time while other sides are measured. The clock starts after a lead-in, when caches are warm and
rounds follow one another as they do in a long run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from crossbow_py.core.errors import CrossbowError
from crossbow_py.core.host import LoadSnapshot, foreign_share
from crossbow_py.telemetry.events import RoundEnd

LEAD_IN_S = 0.25


@dataclass(frozen=True)
class Visit:
    """A window that is wanted, after a lead-in of at least so many seconds and ticks.

    `num_learners` is for a side that can change it; None leaves it as it is.
    """

    seconds: float
    lead_in_s: float = LEAD_IN_S
    lead_in_ticks: int = 1
    num_learners: int | None = None


@dataclass(frozen=True)
class Choice:
    """The choice of the auto side: seconds of choosing an executor, then of training until the learners were settled.

    `settled` is False when a time limit ended the auto-tuner's search.
    """

    executor: str
    num_learners: int
    settled: bool
    executor_s: float
    learners_s: float

    @property
    def tuning_s(self) -> float:
        return self.executor_s + self.learners_s

    def __str__(self) -> str:
        end = "" if self.settled else ", where a time limit ended its search"
        return (
            f"executor {self.executor} in {self.executor_s:.1f} s and K={self.num_learners} after "
            f"{self.learners_s:.1f} s of training{end}"
        )


@dataclass(frozen=True)
class Ready:
    """A side is built. `threads` are intra-op threads of a model; `detail` says what a side chose for itself."""

    threads: int
    detail: str = ""
    choice: Choice | None = None


@dataclass(frozen=True)
class Failure:
    """A side cannot be measured any more, and why."""

    reason: str


@dataclass(frozen=True)
class Window:
    """The result of one window. `foreign_share` is the share of the cores that others took, None where it is unknown.

    `in_effect` is what its last round ran with, see `RoundEnd`.
    """

    images: int
    seconds: float
    foreign_share: float | None
    in_effect: tuple[str, ...] = ()

    @property
    def images_per_s(self) -> float:
        """Throughput by the wall clock."""
        return self.images / self.seconds


class FinishedError(Exception):
    """No more windows are wanted; unwinds the side's loop."""


class Channel(Protocol):
    """The side's end of the pipe: it receives a Visit (None for the end) and sends Ready, Window and Failure."""

    def send(self, obj: Any, /) -> None:
        """Send to the parent."""

    def recv(self) -> Any:
        """Blocks until the parent sends; raises EOFError when it is gone."""


class Gate:
    """Measures windows of a training loop. Used from the loop's thread only.

    Args:
        channel: commands come from here and windows go there.
        synchronize: waits for the device; called around every window.
        snapshot: clock and load, both read there.

    Attributes:
        in_effect: what the last round ran with, which the loop says before each tick; for windows.
    """

    in_effect: tuple[str, ...] = ()

    def __init__(
        self,
        channel: Channel,
        synchronize: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        snapshot: Callable[[], LoadSnapshot] = LoadSnapshot.take,
    ) -> None:
        self._channel, self._synchronize, self._clock, self._snapshot = channel, synchronize, clock, snapshot
        self._visit = Visit(0.0)
        self._images = self._ticks = 0
        self._due_s = 0.0
        self._start: LoadSnapshot | None = None

    @property
    def num_learners(self) -> int | None:
        """The number of learners wanted for the window under way, lead-in included; None leaves it as it is."""
        return self._visit.num_learners

    def ready(self, ready: Ready) -> None:
        """Say that training can start, and wait for the first window. Raises FinishedError when none is wanted."""
        self._channel.send(ready)
        self._await_visit()

    def tick(self, images: int) -> None:
        """Count `images` more; begin or end the window when it is time. Raises FinishedError when it was the last."""
        self._images, self._ticks, now_s = self._images + images, self._ticks + 1, self._clock()
        if now_s < self._due_s or (self._start is None and self._ticks < self._visit.lead_in_ticks):
            return
        self._synchronize()
        now = self._snapshot()
        if self._start is None:
            self._start, self._images = now, 0
            self._due_s = now.wall_s + self._visit.seconds
        else:
            self._channel.send(self._window(self._start, now))
            self._await_visit()

    def _window(self, start: LoadSnapshot, end: LoadSnapshot) -> Window:
        return Window(self._images, end.wall_s - start.wall_s, foreign_share(start, end), self.in_effect)

    def _await_visit(self) -> None:
        try:
            visit = self._channel.recv()
        except EOFError:
            visit = None
        if visit is None:
            raise FinishedError
        self._visit, self._start, self._ticks = visit, None, 0
        self._due_s = self._clock() + visit.lead_in_s


class Paced:
    """Passes the gate after every round, and gives the run the number of learners that the next window wants."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._asked: int | None = None

    def __call__(self, end: RoundEnd) -> int:
        """See `Trainer.fit`. Raises CrossbowError when memory did not hold the learners of the window."""
        if self._asked not in (None, end.num_learners):
            raise CrossbowError(f"memory does not hold {self._asked} learners")
        self._gate.in_effect = end.in_effect
        self._gate.tick(end.images)
        self._asked = self._gate.num_learners or end.num_learners
        return self._asked


class Settling:
    """Lets a run's own auto-tuner work until it has settled or a time limit is over, then calls `ready` and paces.

    From then on the number of learners is left alone: the auto-tuner would take the pauses between windows for a device
    that became slow.
    """

    def __init__(self, gate: Gate, limit_s: float, ready: Callable[[RoundEnd], None]) -> None:
        self._paced, self._limit_s, self._ready, self._is_ready = Paced(gate), limit_s, ready, False

    def __call__(self, end: RoundEnd) -> int | None:
        """See `Trainer.fit`. What the auto-tuner settled on has run a round when `ready` is called."""
        if self._is_ready:
            return self._paced(end)
        if not end.is_settled and end.elapsed_s < self._limit_s:
            return None
        self._is_ready = True
        self._ready(end)
        return end.num_learners
