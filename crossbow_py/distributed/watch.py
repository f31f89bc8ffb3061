"""The watch, which finds the rank that hangs: each rank reports every second, and those that wait read the reports.

Ranks use the launcher's key-value store, by a connection and a thread of their own. The thread goes on while the
process is stuck in a collective operation, which only the end of the process interrupts.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

_SAY_EVERY_S = 1.0
_BEATS_MISSED = 4  # after which a rank counts as silent
EXIT_HANGS = 1
_REMEDY = "The run goes on from its newest checkpoint when it is started again with resume=auto."


@dataclass(frozen=True)
class Said:
    """A rank's message: its number, what the rank is doing, and for how long it has waited for others, if it does."""

    beat: int
    doing: str
    waits_s: float | None
    host: str
    pid: int


@dataclass
class Heard:
    """A rank's last message, and when it was heard, on the listener's clock."""

    said: Said
    at_s: float


class Watch:
    """The watch of a single rank, which does nothing. Base of the watch of several ranks.

    Attributes:
        doing: what the rank is doing, for those who wait for it.
        running: names of the tasks that run now, by stream, which say more than `doing`.
    """

    def __init__(self) -> None:
        self.doing = "starting"
        self.running: Mapping[str, object] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Run an operation that ends once all ranks have reached it. From any thread."""
        yield

    def start(self) -> None:
        """Start to look for ranks that hang."""

    def close(self) -> None:
        """End the thread. Does not raise."""


class RankWatch(Watch):
    """The watch of one of several ranks.

    Args:
        store: a connection for this watch only.
        rank, num_ranks: the rank's index, and the number of ranks.
        timeout_s: how long others may keep this rank waiting.
        end: called with a sentence when a rank hangs; by default it is printed on stderr and the process ends.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        end: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._store, self._rank, self._num_ranks, self._timeout_s = store, rank, num_ranks, timeout_s
        self._end, self._clock = end or _end_process, clock
        self._every_s = min(_SAY_EVERY_S, timeout_s / 5)
        self._since: dict[int, float] = {}
        self._heard: dict[int, Heard] = {}
        self._answered_s = clock()
        self._beat = 0
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._speak, name="crossbow watch speaks", daemon=True),
            threading.Thread(target=self._look, name="crossbow watch looks", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        own = threading.get_ident()
        self._since[own] = self._clock()
        try:
            yield
        finally:
            self._since.pop(own, None)

    def close(self) -> None:
        """See Watch. A thread whose store does not answer is abandoned."""
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(self._every_s)

    def _waited_s(self) -> float | None:
        """Return how long the longest waiting thread has waited, None if none waits."""
        begun = min(self._since.copy().values(), default=None)
        return None if begun is None else self._clock() - begun

    def _speak(self) -> None:
        """Say and listen until closed. The store may block or fail if its host is gone; others then hear silence."""
        while not self._over.wait(self._every_s):
            try:
                self.exchange()
            except Exception:
                return

    def say(self) -> None:
        """Put into the store what this rank is doing."""
        self._beat += 1
        running = next(iter(list(self.running.values())), None)
        doing = self.doing if running is None else f"{running} of {self.doing}"
        said = Said(self._beat, doing, self._waited_s(), socket.gethostname(), os.getpid())
        self._store.set(_key(self._rank), json.dumps(asdict(said)))

    def exchange(self) -> None:
        """Say what this rank is doing, and listen to the others. Blocks until all have said something once."""
        self.say()
        values = self._store.multi_get([_key(rank) for rank in range(self._num_ranks)])
        self._answered_s = now = self._clock()
        for rank, value in enumerate(values):
            heard, known = Said(**json.loads(value)), self._heard.get(rank)
            if known is None or known.said.beat != heard.beat:
                self._heard[rank] = Heard(heard, now)

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            found = self.find()
            if found and not self._over.is_set():
                self._end(found)
                return

    def find(self) -> str | None:
        """Return a sentence on the ranks that hang once this rank has waited for too long, else None."""
        waited = self._waited_s()
        if waited is None or waited < self._timeout_s:
            return None
        begins = f"rank {self._rank} has waited for {waited:.0f} s (distributed.timeout_s={self._timeout_s:g})"
        silent_s = _BEATS_MISSED * self._every_s
        now = self._clock()
        if now - self._answered_s > silent_s:
            return (
                f"{begins} and the launcher's store has not answered for {now - self._answered_s:.0f} s: the network "
                f"to its host is lost, or the host. {_REMEDY}"
            )
        others = {rank: heard for rank, heard in self._heard.copy().items() if rank != self._rank}
        silent = {rank: heard for rank, heard in others.items() if now - heard.at_s > silent_s}
        working = {rank: heard for rank, heard in others.items() if heard.said.waits_s is None}
        guilty = silent or working
        if not guilty:
            return f"{begins}, and so have all others: the network between their hosts is lost. {_REMEDY}"
        named = "; ".join(_describe(rank, heard, now) for rank, heard in sorted(guilty.items()))
        return f"{begins} for {named}. {_REMEDY}"


def _describe(rank: int, heard: Heard, now: float) -> str:
    said = heard.said
    return (
        f"rank {rank} ({said.host}, process {said.pid}), which appears to hang: its last task was {said.doing}, "
        f"last heard of {now - heard.at_s:.0f} s ago"
    )


def _key(rank: int) -> str:
    return f"watch/{rank}"


def _end_process(found: str) -> None:
    """Print what was found and end the process: nothing else interrupts a collective operation."""
    print(f"error: {found}", file=sys.stderr, flush=True)
    os._exit(EXIT_HANGS)
