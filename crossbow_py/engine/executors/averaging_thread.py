"""Averaging beside the caller's thread: on CPU an all-reduce blocks whoever asks for it, and learning is to go on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class AveragingThread:
    """One averaging at a time, on a thread that starts with the first. Used from one thread.

    What an averaging raises is kept, and raised once by whoever waits for it next.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "crossbow averaging")
        self._last: Future[None] | None = None

    def begin(self, body: Callable[[], None]) -> None:
        """Call `body` on the thread. The one before has been waited for."""
        assert self._last is None, "an averaging reads what the one before wrote"
        self._last = self._pool.submit(body)

    def finish(self) -> None:
        """Block until what was begun is over."""
        last, self._last = self._last, None
        try:
            if last is not None:
                last.result()
        finally:
            del last  # lets go of what an error's frames hold

    def check(self) -> None:
        """As `finish`, where that does not block."""
        if self._last is not None and self._last.done():
            self.finish()

    def settle(self) -> None:
        """Block until what was begun is over; raises nothing."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Let what was begun end, as other ranks wait for its sum, and join the thread. Does not raise."""
        self._pool.shutdown()
        self._last = None
