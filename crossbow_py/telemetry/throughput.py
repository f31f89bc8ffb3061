"""Training time, throughput and waiting for data, on an injected clock. It pauses for evaluation and checkpoints."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Lap(NamedTuple):
    """The figures of an interval of training: images per second, and the share of time spent waiting for data."""

    images_per_s: float
    wait_share: float


class _Point(NamedTuple):
    """Seconds of training, images trained and seconds waited, all since the start."""

    elapsed_s: float
    samples: int
    waited_s: float


class ThroughputMeter:
    """Counts samples against the seconds spent training. Not thread-safe: the training loop owns it.

    Args:
        clock: monotonic seconds.
        window_s: seconds of training that `recent` looks back over, about.
        waited_for_ranks_s: the seconds in which this rank only waited for other ranks, also in pauses.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        window_s: float = 5.0,
        waited_for_ranks_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._clock, self._waited_for_ranks_s = clock, waited_for_ranks_s
        self._window_s = window_s
        self._before_s = self._rank_wait_before_s = self._rank_wait_since_s = 0.0
        self._running_since: float | None = None
        self._samples, self._waited_s = 0, 0.0
        self._first = self._lap = _Point(0.0, 0, 0.0)
        self._points = deque([self._first])

    def start(self, elapsed_s: float = 0.0) -> None:
        """Start at zero samples. A resumed run passes its earlier seconds of training, which no rate counts."""
        self._before_s, self._running_since, self._samples, self._waited_s = elapsed_s, self._clock(), 0, 0.0
        self._rank_wait_before_s, self._rank_wait_since_s = 0.0, self._waited_for_ranks_s()
        self._first = self._lap = _Point(elapsed_s, 0, 0.0)
        self._points = deque([self._first])

    def pause(self) -> None:
        """Stop the clock, for an evaluation or a checkpoint. Has no effect if it is stopped."""
        self._rank_wait_before_s = self.rank_wait_s
        self._before_s, self._running_since = self.elapsed_s, None

    def resume(self) -> None:
        """Let the clock run again. Has no effect if it runs."""
        if self._running_since is None:
            self._running_since, self._rank_wait_since_s = self._clock(), self._waited_for_ranks_s()

    def update(self, samples: int) -> None:
        """Count `samples` more that have been trained."""
        self._samples += samples
        self._points.append(self._now())
        while len(self._points) > 2 and self._points[1].elapsed_s <= self._points[-1].elapsed_s - self._window_s:
            self._points.popleft()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for data."""
        begun_s = self.elapsed_s
        try:
            yield
        finally:
            self._waited_s += self.elapsed_s - begun_s

    def lap(self) -> Lap:
        """Return the figures since the last lap (or the start), for the throughput of an epoch."""
        since, self._lap = self._lap, self._now()
        return _between(since, self._lap)

    @property
    def elapsed_s(self) -> float:
        """Return the seconds of training without pauses."""
        return self._before_s + (0.0 if self._running_since is None else self._clock() - self._running_since)

    @property
    def waited_s(self) -> float:
        """Return the seconds of training spent waiting for data, since the start."""
        return self._waited_s

    @property
    def rank_wait_s(self) -> float:
        """Return the seconds of training in which this rank only waited for other ranks, since the start."""
        since = 0.0 if self._running_since is None else self._waited_for_ranks_s() - self._rank_wait_since_s
        return self._rank_wait_before_s + since

    @property
    def samples(self) -> int:
        """Return the samples counted since the start."""
        return self._samples

    @property
    def whole(self) -> Lap:
        """Return the figures since the start."""
        return _between(self._first, self._now())

    @property
    def recent(self) -> Lap:
        """Return the figures over the window, up to the last update."""
        return _between(self._points[0], self._points[-1])

    def _now(self) -> _Point:
        return _Point(self.elapsed_s, self._samples, self._waited_s)


def _between(start: _Point, end: _Point) -> Lap:
    seconds = end.elapsed_s - start.elapsed_s
    if seconds <= 0:
        return Lap(0.0, 0.0)
    return Lap((end.samples - start.samples) / seconds, (end.waited_s - start.waited_s) / seconds)
