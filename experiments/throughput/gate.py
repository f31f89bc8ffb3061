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

from experiments.throughput.load import LoadSnapshot, foreign_share

LEAD_IN_S = 0.25


@dataclass(frozen=True)
class Ready:
    """A side is built. `threads` are intra-op threads of a model; `detail` says what a side chose for itself."""

    threads: int
    detail: str


@dataclass(frozen=True)
class Window:
    """What one window came to. `foreign_share` is the cores' share that others took, None where it is unknown."""

    images: int
    seconds: float
    foreign_share: float | None

    @property
    def images_per_s(self) -> float:
        """Throughput by the wall clock."""
        return self.images / self.seconds


class FinishedError(Exception):
    """No more windows are wanted; unwinds the side's loop."""


class Channel(Protocol):
    """The side's end of the pipe: it receives seconds (None for the end) and sends Ready and Window."""

    def send(self, obj: Any, /) -> None:
        """To the parent."""

    def recv(self) -> Any:
        """Blocks until the parent sends; raises EOFError when it is gone."""


class Gate:
    """Measures windows of a training loop. Used from the loop's thread only.

    Args:
        channel: commands come from here and windows go there.
        synchronize: waits for the device; called around every window.
        snapshot: clock and load, both read there.
    """

    def __init__(
        self,
        channel: Channel,
        synchronize: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        snapshot: Callable[[], LoadSnapshot] = LoadSnapshot.take,
    ) -> None:
        self._channel, self._synchronize, self._clock, self._snapshot = channel, synchronize, clock, snapshot
        self._images = 0
        self._seconds = self._due_s = 0.0
        self._start: LoadSnapshot | None = None

    def ready(self, threads: int, detail: str = "") -> None:
        """Say that training can start, and wait for the first window. Raises FinishedError when none is wanted."""
        self._channel.send(Ready(threads, detail))
        self._await_window()

    def tick(self, images: int) -> None:
        """Count `images` more; begin or end the window when it is time. Raises FinishedError when it was the last."""
        self._images += images
        if self._clock() < self._due_s:
            return
        self._synchronize()
        now = self._snapshot()
        if self._start is None:
            self._start, self._images = now, 0
            self._due_s = now.wall_s + self._seconds
        else:
            self._channel.send(Window(self._images, now.wall_s - self._start.wall_s, foreign_share(self._start, now)))
            self._await_window()

    def _await_window(self) -> None:
        try:
            seconds = self._channel.recv()
        except EOFError:
            seconds = None
        if seconds is None:
            raise FinishedError
        self._seconds, self._start = seconds, None
        self._due_s = self._clock() + LEAD_IN_S
