"""Jobs that run side by side in processes elsewhere: who is started, who is started again, and how all are ended."""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from crossbow_py.core.errors import CrossbowError
from crossbow_py.core.signals import EXIT_TERMINATED, StopSignal

_TURN_S = 0.2  # between two looks at all processes


@dataclass(frozen=True)
class Ended:
    """The end of a job's process: its exit code, negative for the signal that killed it, and what it has printed."""

    code: int
    out: str = ""
    err: str = ""


@dataclass(frozen=True)
class Lost:
    """The end of what held a job's process, and with it of the process."""

    reason: str


class JobProcess(Protocol):
    """A job's process elsewhere. Nothing here blocks."""

    @property
    def is_placed(self) -> bool:
        """Return whether a place has been found for it."""

    @property
    def has_printed(self) -> bool:
        """Return whether it has printed anything, by the last `poll`."""

    def poll(self) -> Ended | Lost | None:
        """Return how it has ended; None while it runs, or waits for a place. Raises UserError for a wrong place."""

    def stop(self) -> None:
        """Ask it to end, with its checkpoint if it has begun; `poll` says when it has."""

    def close(self) -> None:
        """Give its place to others, once it has ended. Does not raise."""


class Crew:
    """Keeps jobs running, each until it ends by itself; one whose process is lost is started again.

    A process is lost with its machine, and if a signal ends it that was not sent from here.

    Args:
        names: those of the jobs.
        start: starts a job of that number; the second argument says whether it was started before.
        most: how many run at once.
        max_restarts: how often a job is started again.
        say: takes sentences for the user.
    """

    def __init__(
        self, names: Sequence[str], start: Callable[[int, bool], JobProcess], most: int, max_restarts: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._names, self._start, self._most, self._max_restarts, self._say = names, start, most, max_restarts, say
        self._waiting = deque(range(len(names)))
        self._running: dict[int, JobProcess] = {}
        self._restarts: Counter[int] = Counter()
        self._is_stopping = self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Return whether nothing runs or waits any more."""
        return not self._running and not self._waiting

    @property
    def num_placed(self) -> int:
        """The number of processes that have a place."""
        return sum(process.is_placed for process in self._running.values())

    @property
    def has_printed(self) -> bool:
        """Return whether any process that runs has printed something."""
        return any(process.has_printed for process in self._running.values())

    def turn(self) -> list[tuple[int, Ended]]:
        """Start what may run, and look at each process once. Returns the jobs that have ended for good.

        Raises UserError for a process in a wrong place.
        """
        while self._waiting and len(self._running) < self._most:
            number = self._waiting.popleft()
            self._running[number] = self._start(number, self._restarts[number] > 0)
        over: list[tuple[int, Ended]] = []
        for number, process in list(self._running.items()):
            found = process.poll()
            if found is not None:
                del self._running[number]
                process.close()
                over += self._settled(number, found)
        return over

    def stop(self) -> None:
        """Ask all processes to end, and start none from now on. Called again, it does nothing."""
        if not self._is_stopping:
            self._is_stopping = self._is_closed = True
            self._waiting.clear()
            for process in self._running.values():
                process.stop()

    def start_no_more(self) -> None:
        """Start none from now on: give up those that have no place yet, and those that are lost."""
        self._waiting.clear()
        self._is_closed = True
        for process in self._running.values():
            if not process.is_placed:
                process.stop()

    def _settled(self, number: int, found: Ended | Lost) -> list[tuple[int, Ended]]:
        """Return the end of a job, or nothing if it is started again."""
        reason = _why_lost(found)
        if isinstance(found, Ended) and found.code >= 0 and (reason is None or self._is_closed):
            return [(number, found)]
        if self._is_closed:
            return [(number, Ended(EXIT_TERMINATED))]
        name, before = self._names[number], self._restarts[number]
        if before >= self._max_restarts:
            again = f" after it was started again {before} time{'s' * (before > 1)}" if before else ""
            return [(number, Ended(1, err=f"{name} was lost{again} ({reason}); what it had finished is kept."))]
        self._restarts[number] += 1
        self._say(f"{name} was lost ({reason}) and is started again, {before + 1} of {self._max_restarts} times")
        self._waiting.append(number)
        return []


def _why_lost(found: Ended | Lost) -> str | None:
    """Return why a job has not ended by itself; None if it has."""
    if isinstance(found, Lost):
        return found.reason
    if found.code == EXIT_TERMINATED:
        return "SIGTERM ended its process"
    return None if found.code >= 0 else f"{_signal_name(-found.code)} ended its process"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of a real-time signal
        return f"signal {number}"


def run_crew(
    crew: Crew, ended: Callable[[int, Ended], None], look: Callable[[], None] = lambda: None,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:  # fmt: skip
    """Run jobs to their end. At Ctrl-C or SIGTERM all end with their checkpoints; a second Ctrl-C acts at once.

    Args:
        crew: the jobs.
        ended: takes the number of each job that has ended, and how.
        look: called every turn, until a signal comes.
        sleep: waits for some seconds.

    Returns:
        The status of the signal, see `StopSignal`; None if there was none.

    Raises:
        CrossbowError: a process is in a wrong place, or what `look` raises; once all have ended.
    """

    def turn() -> None:
        for number, end in crew.turn():
            ended(number, end)
        if not crew.is_over:
            sleep(_TURN_S)

    with StopSignal(enabled=True) as signals:
        try:
            while not crew.is_over:
                turn()
                if signals.status is not None:
                    crew.stop()
                else:
                    look()
        except CrossbowError:
            crew.stop()
            while not crew.is_over:
                turn()
            raise
        return signals.status
