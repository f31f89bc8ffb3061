"""Several learners an operator each by turns, so that all are at the same place of their pass at the same moment."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

Body = Callable[[Callable[[], None]], None]


class StoppedError(Exception):
    """Another runner has failed."""


class Relay:
    """One runner at a time runs; it keeps what it holds while the others have their turns."""

    def __init__(self, num_runners: int) -> None:
        self._signals = [threading.Semaphore(0) for _ in range(num_runners)]
        self._order = deque(range(num_runners))  # the first has the turn
        self.failure: Exception | None = None

    def hand_on(self) -> None:
        """Let each of the others run until it calls this, then go on. Raises StoppedError when one has failed."""
        own = self._order[0]
        self._order.rotate(-1)
        self._signals[self._order[0]].release()
        self._signals[own].acquire()
        if self.failure is not None:
            raise StoppedError

    def run(self, runner: int, body: Body) -> None:
        """All of a runner's turns; the body of its thread."""
        self._signals[runner].acquire()
        try:
            if self.failure is None:
                body(self.hand_on)
        except StoppedError:
            pass
        except Exception as error:
            # Frames hold tensors, which are to be gone.
            self.failure = error.with_traceback(None)
        finally:
            self._order.popleft()
            if self._order:
                self._signals[self._order[0]].release()

    def start(self) -> None:
        """Give the first its first turn."""
        self._signals[0].release()


def run_in_step(bodies: Sequence[Body]) -> None:
    """Run bodies, a thread each; each is given what it is to call after every operator. Raises what one has raised."""
    relay = Relay(len(bodies))
    threads = [
        threading.Thread(target=relay.run, args=(runner, body), name=f"learner {runner}", daemon=True)
        for runner, body in enumerate(bodies)
    ]
    for thread in threads:
        thread.start()
    relay.start()
    for thread in threads:
        thread.join()
    failure, relay.failure = relay.failure, None  # no circle of frames and exceptions is to keep tensors
    if failure is not None:
        try:
            raise failure
        finally:
            del failure
