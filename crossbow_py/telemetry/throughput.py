"""Training time and throughput on an injected clock. Evaluation and checkpoints are left out by pausing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class ThroughputMeter:
    """Counts samples against the seconds spent training. Not thread-safe: the training loop owns it.

    Args:
        clock: monotonic seconds.
        window_s: `recent_images_per_s` looks back over about that many seconds of training.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, window_s: float = 5.0) -> None:
        self._clock = clock
        self._window_s = window_s
        self._before_s = 0.0
        self._running_since: float | None = None
        self._samples = 0
        self._first: tuple[float, int] = (0.0, 0)
        self._lap: tuple[float, int] = (0.0, 0)
        self._points: deque[tuple[float, int]] = deque([(0.0, 0)])

    def start(self, elapsed_s: float = 0.0) -> None:
        """Begin at zero samples; a resumed run passes the seconds it had trained before, which no rate counts."""
        self._before_s, self._running_since, self._samples = elapsed_s, self._clock(), 0
        self._first = self._lap = (elapsed_s, 0)
        self._points = deque([self._first])

    def pause(self) -> None:
        """Stop the time, for an evaluation or a checkpoint. No effect when already stopped."""
        self._before_s, self._running_since = self.elapsed_s, None

    def resume(self) -> None:
        """Let the time run on. No effect when it runs."""
        if self._running_since is None:
            self._running_since = self._clock()

    def update(self, samples: int) -> None:
        """Count `samples` more, trained by now."""
        self._samples += samples
        now_s = self.elapsed_s
        self._points.append((now_s, self._samples))
        while len(self._points) > 2 and self._points[1][0] <= now_s - self._window_s:
            self._points.popleft()

    def lap(self) -> float:
        """Images per second since the last lap (or the start), which is how an epoch's throughput is taken."""
        now = (self.elapsed_s, self._samples)
        rate, self._lap = _rate(self._lap, now), now
        return rate

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, pauses left out."""
        return self._before_s + (0.0 if self._running_since is None else self._clock() - self._running_since)

    @property
    def images_per_s(self) -> float:
        """Throughput since the start."""
        return _rate(self._first, (self.elapsed_s, self._samples))

    @property
    def recent_images_per_s(self) -> float:
        """Throughput over the window, up to the last update."""
        return _rate(self._points[0], self._points[-1])


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float:
    seconds = end[0] - start[0]
    return (end[1] - start[1]) / seconds if seconds > 0 else 0.0
