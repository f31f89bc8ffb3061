"""Signs of life of a worker process, given by a thread of its own while the others are busy for long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager


class Heartbeat:
    """Calls `beat` every so often, from `start` until nothing is needed any more, or `close`.

    The thread is a daemon: the process may end without `close`.

    Args:
        beat: called with the lock held. What it raises is kept, and the next beat tries again.
        is_needed: looked at before each beat, with the lock held; the thread ends when it is false.
        lock: guards what these touch; one that its holder may take again.
        every_s: seconds between beats, real ones.
    """

    def __init__(
        self, beat: Callable[[], None], is_needed: Callable[[], bool], lock: AbstractContextManager[bool],
        every_s: float,
    ) -> None:  # fmt: skip
        self._beat, self._is_needed, self._lock, self._every_s = beat, is_needed, lock, every_s
        self._ended = threading.Event()  # of the thread there is; each has its own
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is a thread."""
        with self._lock:
            return self._thread is not None

    def start(self) -> None:
        """Begin, where it has not begun."""
        with self._lock:
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._ended,), name="heartbeat", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread; a beat that is under way is waited for. It may be started again. The lock is not to be held.

        Nothing is raised: what the last beat raised is kept on.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            self._ended.set()
        if thread is not None:
            thread.join()

    def raise_error(self) -> None:
        """Raise what the last beat raised, once."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(self._every_s):
            with self._lock:
                if ended.is_set():
                    return
                if not self._is_needed():
                    self._thread = None
                    return
                try:
                    self._beat()
                    self._error = None
                except Exception as error:  # for the thread that uses this; here nobody would see it
                    self._error = error
