"""The watch, which finds the rank that hangs: each rank reports every second, and those that wait read the reports.

Ranks use the launcher's key-value store, by a connection and a thread of their own. The thread goes on while the
process is stuck in a collective operation, which only the end of the process interrupts.

A rank that has waited for too long first asks the others for their stacks. Each writes those of its own threads, also
the one that hangs, if its thread still runs; then the ranks that waited record what they know, and end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from crossbow_py.core.hanging_rank import HangingRank
from crossbow_py.distributed.hang import (
    described,
    innermost,
    nccl_file,
    stacks_file,
    within,
    write_nccl_trace,
    write_stacks,
)
from crossbow_py.distributed.idle_clock import IdleClock

_SAY_EVERY_S = 1.0
_BEATS_MISSED = 4  # after which a rank counts as silent
_BEATS_FOR_RECORDS = 5  # for which a rank waits until others have written theirs
_WRITE_S = 3.0  # for a file, on a disk that may not answer
EXIT_HANGS = 1
_REMEDY = "The run goes on from its newest checkpoint when it is started again with resume=auto."


class Task(Protocol):
    """A task of a round; as text it is the task's name."""

    @property
    def round_index(self) -> int:
        """Return the round it belongs to, which may be the one before that of the training loop."""


@dataclass(frozen=True)
class Said:
    """A rank's message.

    Attributes:
        beat: its number.
        doing: what the rank is doing.
        waits_s: for how long it has waited for others; None if it does not.
        on_device: whether it waits for its device, on which a sum may wait for others.
        asks: whether it has found that a rank hangs, and asks all for their stacks.
        function: where its threads were when it was asked; None before, or if they ran nothing.
        wrote: whether it has answered that.
        stacks: the file in the run's folder that has its stacks; None if none was written.
        recorded: whether it has recorded the end of the run, for all.
    """

    beat: int
    doing: str
    waits_s: float | None
    host: str
    pid: int
    on_device: bool = False
    asks: bool = False
    function: str | None = None
    wrote: bool = False
    stacks: str | None = None
    recorded: bool = False


@dataclass
class Heard:
    """A rank's last message, when it was heard, and since when its task is the same, on the listener's clock."""

    said: Said
    at_s: float
    same_since_s: float


class Watch:
    """The watch of a single rank, which does nothing. Base of the watch of several ranks.

    Attributes:
        doing: what the rank is doing, for those who wait for it.
        running: the tasks that host threads run now, by stream, which say more than `doing`.
        idle: the time in which the rank only waits for others.
        has_nccl: whether ranks sum by NCCL.
        folder: the run's folder while it is trained, for stacks; None for none.
        record: called, on the first rank that does not hang, with the ranks that hang and a sentence, to record the end
            of the run while it is trained. It may block or fail.
    """

    def __init__(self) -> None:
        self.doing = "starting"
        self.running: Mapping[str, Task] = {}
        self.idle = IdleClock()
        self.has_nccl = False
        self.folder: Path | None = None
        self.record: Callable[[Sequence[HangingRank], str], None] | None = None

    @contextmanager
    def waiting(self, on_device: bool = False) -> Iterator[None]:
        """Run an operation that ends once all ranks have reached it, or a device has. From any thread."""
        yield

    @property
    def is_ending(self) -> bool:
        """Return whether a rank has found that one hangs, so that the run ends, and is recorded, for that."""
        return False

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
        self._on_device: set[int] = set()  # threads of `_since` that wait for the device
        self._heard: dict[int, Heard] = {}
        self._answered_s = clock()
        self._beat = 0
        self._asks = self._wrote = self._recorded = False
        self._function: str | None = None
        self._stacks: str | None = None
        self._over, self._has_said_recorded = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._speak, name="crossbow watch speaks", daemon=True),
            threading.Thread(target=self._look, name="crossbow watch looks", daemon=True),
        ]

    @property
    def is_ending(self) -> bool:
        return self._asks or self._wrote

    def start(self) -> None:
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    @contextmanager
    def waiting(self, on_device: bool = False) -> Iterator[None]:
        own = threading.get_ident()
        self._since[own] = self._clock()
        if on_device:
            self._on_device.add(own)
        try:
            with nullcontext() if on_device else self.idle.waiting():
                yield
        finally:
            self._since.pop(own, None)
            self._on_device.discard(own)

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
        said = self._message()
        self._store.set(_key(self._rank), json.dumps(asdict(said)))
        if said.recorded:
            self._has_said_recorded.set()

    def _message(self) -> Said:
        running = next(iter(list(self.running.values())), None)
        return Said(
            beat=self._beat,
            doing=self.doing if running is None else f"{running} of round {running.round_index}",
            waits_s=self._waited_s(),
            host=socket.gethostname(),
            pid=os.getpid(),
            on_device=bool(self._on_device),
            asks=self._asks,
            function=self._function,
            wrote=self._wrote,
            stacks=self._stacks,
            recorded=self._recorded,
        )

    def exchange(self) -> None:
        """Say what this rank is doing, and listen to the others. Blocks until all have said something once.

        If one of them asks for stacks, write them and say so.
        """
        self.say()
        values = self._store.multi_get([_key(rank) for rank in range(self._num_ranks)])
        self._answered_s = now = self._clock()
        for rank, value in enumerate(values):
            heard, known = Said(**json.loads(value)), self._heard.get(rank)
            if known is None or known.said.beat != heard.beat:
                same = known is not None and known.said.doing == heard.doing
                self._heard[rank] = Heard(heard, now, known.same_since_s if known and same else now)
        if not self._wrote and any(heard.said.asks for heard in self._heard.values()):
            self._write()
            self.say()

    def _write(self) -> None:
        """Write the stacks of this process's threads, and what NCCL was doing. Takes seconds; does not raise."""
        threads = self.idle.computing_threads or {threading.main_thread().ident or 0}
        self._function, folder, said = innermost(threads), self.folder, self._message()
        if folder is not None:
            waits = "no" if said.waits_s is None else f"for {said.waits_s:.0f} s"
            lines = [
                f"rank {self._rank} of {self._num_ranks} on {said.host}, process {said.pid}, {_time(time.time())}",
                f"task: {said.doing}",
                f"function: {self._function}",
                f"waits for other ranks: {waits}",
            ]
            name = stacks_file(self._rank)
            if within(_WRITE_S, lambda: write_stacks(folder / name, lines)):
                self._stacks = name
            if self.has_nccl:
                within(_WRITE_S, lambda: write_nccl_trace(folder / nccl_file(self._rank)))
        self._wrote = True

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            found = self.find()
            if found and not self._over.is_set():
                self._end(self._leave_records(found))
                return

    def _leave_records(self, found: str) -> str:
        """Have all ranks write their stacks, and one of them record the end. Returns the sentence with what they say.

        The ranks that waited end together, lest one takes the end of another for the cause. Takes seconds at most.
        """
        self._asks = True
        self._await(lambda: self._wrote and all(heard.said.wrote for heard in self._living().values()))
        if not self._wrote:  # the thread that speaks does not hear any more
            self._write()
        hanging = self.hanging()
        found = self.find() or found
        first = min({self._rank, *self._living()} - {each.rank for each in hanging}, default=self._rank)
        record = self.record
        if first == self._rank:
            if record is not None:
                within(_WRITE_S, lambda: record(hanging, found))
            self._recorded = True
            self._has_said_recorded.wait(2 * self._every_s)
        else:
            self._await(lambda: first not in self._living() or self._heard[first].said.recorded)
        return found

    def _await(self, is_done: Callable[[], bool]) -> None:
        for _ in range(_BEATS_FOR_RECORDS):
            self._over.wait(self._every_s)
            if is_done() or self._over.is_set():
                return

    def _living(self) -> dict[int, Heard]:
        """Return what was heard of the ranks that are not silent, this one included."""
        limit_s = self._clock() - _BEATS_MISSED * self._every_s
        return {rank: heard for rank, heard in self._heard.copy().items() if heard.at_s >= limit_s}

    def hanging(self) -> list[HangingRank]:
        """Return the ranks that this one waits for: the silent ones, or if there are none those that do not wait."""
        living = self._living()
        others = {rank: heard for rank, heard in sorted(self._heard.copy().items()) if rank != self._rank}
        silent = [rank for rank in others if rank not in living]
        working = [rank for rank, heard in others.items() if heard.said.waits_s is None]
        return [self._hanging(rank, others[rank]) for rank in silent or working]

    def _hanging(self, rank: int, heard: Heard) -> HangingRank:
        now, said = self._clock(), heard.said
        return HangingRank(
            rank=rank,
            host=said.host,
            pid=said.pid,
            doing=said.doing,
            since=_time(time.time() - (now - heard.same_since_s)),
            heard_s=now - heard.at_s,
            function=said.function,
            stacks=said.stacks,
        )

    def find(self) -> str | None:
        """Return a sentence on the ranks that hang once this rank, or another, has waited for too long, else None."""
        waited = self._waited_s()
        if waited is None or (waited < self._timeout_s and not self._is_asked()):
            return None
        begins = f"rank {self._rank} has waited for {waited:.0f} s (distributed.timeout_s={self._timeout_s:g})"
        silence_s = self._clock() - self._answered_s
        if silence_s > _BEATS_MISSED * self._every_s:
            return (
                f"{begins} and the launcher's store has not answered for {silence_s:.0f} s: the network "
                f"to its host is lost, or the host. {_REMEDY}"
            )
        hanging = self.hanging()
        if not hanging:
            or_device = ", or a device hangs" if any(each.said.on_device for each in self._heard.values()) else ""
            return f"{begins}, and so have all others: the network between their hosts is lost{or_device}. {_REMEDY}"
        return f"{begins} for {described(hanging, self._gone_hosts(hanging))}. {_REMEDY}"

    def _is_asked(self) -> bool:
        """Return whether another rank has waited for too long, and will end."""
        return any(heard.said.asks for rank, heard in self._living().items() if rank != self._rank)

    def _gone_hosts(self, hanging: Sequence[HangingRank]) -> set[str]:
        """Return the hosts on which several ranks were, and of which none answers."""
        answering = {heard.said.host for heard in self._living().values()}
        hosts = [each.host for each in hanging if each.host not in answering]
        return {host for host in hosts if hosts.count(host) > 1}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _key(rank: int) -> str:
    return f"watch/{rank}"


def _end_process(found: str) -> None:
    """Print what was found and end the process: nothing else interrupts a collective operation."""
    print(f"error: {found}", file=sys.stderr, flush=True)
    os._exit(EXIT_HANGS)
