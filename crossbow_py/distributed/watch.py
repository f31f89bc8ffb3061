"""The watch, which finds the rank that hangs: each rank reports every second, and those that wait read the reports.

Ranks use the launcher's key-value store, by a connection and a thread of their own. The thread goes on while the
process is stuck in a collective operation, which only the end of the process interrupts.

A rank that has waited for too long first asks the others for their stacks. Each writes those of its own threads, also
the one that hangs, if its thread still runs; then the ranks that waited record what they know, and end. If in these
seconds the rank they wait for was only late, all go on. NCCL's operations are in torch's own record of them.
"""

from __future__ import annotations

import faulthandler
import json
import math
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
from crossbow_py.distributed.hang import described, innermost, stacks_file, within, write_nccl_trace, write_stacks
from crossbow_py.distributed.idle_clock import IdleClock

_REPORT_EVERY_S = 1.0
_BEATS_MISSED = 4  # after which a rank counts as silent
_BEATS_TO_JOIN = 3  # of waiting, after which a rank has heard again from one that has waited for too long
_BEATS_TO_ANSWER = 4  # until a question, and then its answer, have been sent and heard
_WRITE_S = 3.0  # for a file, on a disk that may not answer
_REMEDY = "The run goes on from its newest checkpoint when it is started again with resume=auto."


class Task(Protocol):
    """A task of a round; as text it is the task's name."""

    @property
    def round_index(self) -> int:
        """Return the round it belongs to, which may be the one before that of the training loop."""


@dataclass(frozen=True)
class Status:
    """A rank's message in the store.

    Attributes:
        beat: its number.
        doing: what the rank is doing.
        waits_s: for how long it has waited for others; None if it does not.
        on_device: whether it waits for its device, on which a sum may wait for others.
        asks: whether it has found that a rank hangs, and asks all for their stacks.
        answered: whether it has answered that.
        function: where its threads were when it was asked; None before, or if they ran nothing.
        stacks: the file in the run's folder that has its stacks; None if none was written.
    """

    beat: int
    doing: str
    waits_s: float | None
    host: str
    pid: int
    on_device: bool = False
    asks: bool = False
    answered: bool = False
    function: str | None = None
    stacks: str | None = None


@dataclass(frozen=True)
class Heard:
    """A rank's last status, when it was heard, and since when its task is the same, on the listener's clock."""

    status: Status
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
        end: called with a sentence when a rank hangs; by default it is printed on stderr and the process ends. Until
            then no thread leaves its wait, so that nothing else is recorded.
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
        self._end, self._clock = end or self._end_process, clock
        self._every_s = min(_REPORT_EVERY_S, timeout_s / 5)
        self._answer_s = _WRITE_S + _BEATS_TO_ANSWER * self._every_s
        self._waits: dict[int, tuple[float, bool]] = {}  # by thread: since when, and whether for the device
        self._heard: dict[int, Heard] = {}
        self._store_answered_s = clock()
        self._beat = 0
        self._asks = self._is_asked = self._answered = False
        self._function: str | None = None
        self._stacks: str | None = None
        self._closed = threading.Event()
        self._leaves = threading.Lock()  # held by a wait that ends, by `close`, or while the process ends
        self._threads = [
            threading.Thread(target=self._exchange_until_closed, name="crossbow watch reports", daemon=True),
            threading.Thread(target=self._look_until_closed, name="crossbow watch looks", daemon=True),
        ]

    @property
    def is_ending(self) -> bool:
        return self._asks or self._answered

    def start(self) -> None:
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    @contextmanager
    def waiting(self, on_device: bool = False) -> Iterator[None]:
        own = threading.get_ident()
        self._waits[own] = self._clock(), on_device
        try:
            with nullcontext() if on_device else self.idle.waiting():
                yield
        except Exception:
            # Others may have ended for the rank that hangs. What this one knows of it comes before the lost connection.
            self._wait_until(lambda: not self._asks, 2 * self._answer_s)
            raise
        finally:
            with self._leaves:
                self._waits.pop(own, None)

    def close(self) -> None:
        """See Watch. A thread whose store does not answer is abandoned."""
        with self._leaves:
            self._closed.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(self._every_s)

    def report(self) -> None:
        """Put this rank's status into the store."""
        self._beat += 1
        self._store.set(_key(self._rank), json.dumps(asdict(self._status())))

    def exchange(self) -> None:
        """Report, and read what the others have reported. Blocks until all have done so once.

        If one of them asks for stacks, a thread of its own writes them, as a disk may be slow.
        """
        self.report()
        values = self._store.multi_get([_key(rank) for rank in range(self._num_ranks)])
        self._store_answered_s = now = self._clock()
        for rank, value in enumerate(values):
            status, last = Status(**json.loads(value)), self._heard.get(rank)
            if last is None or last.status.beat != status.beat:
                same = last is not None and last.status.doing == status.doing
                self._heard[rank] = Heard(status, now, last.same_since_s if last and same else now)
        was_asked, self._is_asked = self._is_asked, any(heard.status.asks for heard in self._heard.values())
        if not self._is_asked:
            self._answered, self._function, self._stacks = False, None, None
        elif not was_asked:
            threading.Thread(target=self._answer, name="crossbow records", daemon=True).start()

    def hanging(self) -> list[HangingRank]:
        """Return the ranks that this one waits for: the silent ones, or if there are none those that do not wait.

        Empty if the store is silent, as nothing is known of them then.
        """
        if self._is_cut_off():
            return []
        living = self._living()
        others = {rank: heard for rank, heard in sorted(self._heard.copy().items()) if rank != self._rank}
        silent = [rank for rank in others if rank not in living]
        working = [rank for rank, heard in others.items() if heard.status.waits_s is None]
        return [self._hanging(rank, others[rank]) for rank in silent or working]

    def find(self) -> str | None:
        """Return a sentence on the ranks that hang once this rank, or another, has waited for too long, else None."""
        waited = self._waited_s()
        if waited is None or (waited < self._timeout_s and not self._joins(waited)):
            return None
        begins = f"rank {self._rank} has waited for {waited:.0f} s (distributed.timeout_s={self._timeout_s:g})"
        if self._is_cut_off():
            silence_s = self._clock() - self._store_answered_s
            return (
                f"{begins} and the launcher's store has not answered for {silence_s:.0f} s: the network "
                f"to its host is lost, or the host. {_REMEDY}"
            )
        hanging = self.hanging()
        if not hanging:
            or_device = ", or a device hangs" if any(each.status.on_device for each in self._heard.values()) else ""
            return f"{begins}, and so have all others: the network between their hosts is lost{or_device}. {_REMEDY}"
        return f"{begins} for {described(hanging, self._gone_hosts(hanging))}. {_REMEDY}"

    def _exchange_until_closed(self) -> None:
        """Exchange once a second. The store may block or fail if its host is gone; others then hear silence."""
        while not self._closed.wait(self._every_s):
            try:
                self.exchange()
            except Exception:
                return

    def _look_until_closed(self) -> None:
        while not self._closed.wait(self._every_s):
            if self.find() and self._end_together():
                return

    def _end_together(self) -> bool:
        """Have all ranks write their stacks, and one of them record the end; then end. Takes seconds at most.

        The ranks that waited end together, lest one takes the end of another for the cause. Returns False if there is
        no end, as the rank that was late has come, or as this watch was closed.
        """
        self._asks = True
        self._wait_until(lambda: not self.find() or self._is_cut_off() or self._all_answered(), self._answer_s)
        if self._is_cut_off() and not self._is_asked:  # the thread that exchanges has not even read this question
            self._answer()
        found, hanging = self.find(), self.hanging()
        records = self._rank == min({self._rank, *self._living()} - {each.rank for each in hanging})
        if not records:  # while the first one does
            self._wait_until(lambda: not self.find(), _WRITE_S)
        with self._leaves:
            ends = found is not None and self.find() is not None and not self._closed.is_set()
            if ends and found is not None:
                record = self.record
                if records and record is not None:
                    within(_WRITE_S, lambda: record(hanging, found))
                self._end(found)
        self._asks = False
        return ends

    def _end_process(self, found: str) -> None:
        """Print what was found and end the process: nothing else interrupts a collective operation.

        A thread of C, which needs no lock of Python, ends it if printing or writing blocks. It exits with 1, too.
        """
        try:
            faulthandler.dump_traceback_later(_WRITE_S + 1.0, exit=True, file=os.open(os.devnull, os.O_WRONLY))
            print(f"error: {found}", file=sys.stderr, flush=True)
            if self.has_nccl and self.folder is not None:
                write_nccl_trace(self.folder, self._rank)
        finally:
            os._exit(1)

    def _answer(self) -> None:
        """Write the stacks of this process's threads. Takes seconds; does not raise."""
        threads = self.idle.computing_threads or {threading.main_thread().ident or 0}
        self._function, folder, status = innermost(threads), self.folder, self._status()
        if folder is not None:
            waits = "no" if status.waits_s is None else f"for {status.waits_s:.0f} s"
            lines = [
                f"rank {self._rank} of {self._num_ranks} on {status.host}, process {status.pid}, {_time(time.time())}",
                f"task: {status.doing}",
                f"function: {self._function}",
                f"waits for other ranks: {waits}",
            ]
            name = stacks_file(self._rank)
            if within(_WRITE_S, lambda: write_stacks(folder / name, lines)):
                self._stacks = name
        self._answered = True

    def _status(self) -> Status:
        running = next(iter(list(self.running.values())), None)
        return Status(
            beat=self._beat,
            doing=self.doing if running is None else f"{running} of round {running.round_index}",
            waits_s=self._waited_s(),
            host=socket.gethostname(),
            pid=os.getpid(),
            on_device=any(on_device for _, on_device in self._waits.copy().values()),
            asks=self._asks,
            answered=self._answered,
            function=self._function,
            stacks=self._stacks,
        )

    def _hanging(self, rank: int, heard: Heard) -> HangingRank:
        now, status = self._clock(), heard.status
        return HangingRank(
            rank=rank,
            host=status.host,
            pid=status.pid,
            doing=status.doing,
            since=_time(time.time() - (now - heard.same_since_s)),
            heard_s=now - heard.at_s,
            function=status.function,
            stacks=status.stacks,
        )

    def _waited_s(self) -> float | None:
        """Return how long the longest waiting thread has waited, None if none waits."""
        begun = min((since for since, _ in self._waits.copy().values()), default=None)
        return None if begun is None else self._clock() - begun

    def _living(self) -> dict[int, Heard]:
        """Return what was heard of the ranks that are not silent, this one included."""
        limit_s = self._clock() - _BEATS_MISSED * self._every_s
        return {rank: heard for rank, heard in self._heard.copy().items() if heard.at_s >= limit_s}

    def _gone_hosts(self, hanging: Sequence[HangingRank]) -> set[str]:
        """Return the hosts on which several ranks were, and of which none answers."""
        answering = {heard.status.host for heard in self._living().values()}
        hosts = [each.host for each in hanging if each.host not in answering]
        return {host for host in hosts if hosts.count(host) > 1}

    def _is_cut_off(self) -> bool:
        """Return whether the store does not answer this rank."""
        return self._clock() - self._store_answered_s > _BEATS_MISSED * self._every_s

    def _all_answered(self) -> bool:
        return self._answered and all(heard.status.answered for heard in self._living().values())

    def _joins(self, waited_s: float) -> bool:
        """Return whether another rank has waited for too long, and has said so since this one's wait began."""
        others = [heard.status for rank, heard in self._living().items() if rank != self._rank]
        asks = any(each.asks and each.waits_s is not None and each.waits_s >= self._timeout_s for each in others)
        return asks and waited_s >= _BEATS_TO_JOIN * self._every_s

    def _wait_until(self, is_done: Callable[[], bool], seconds: float) -> None:
        pause_s = self._every_s / 4
        for _ in range(math.ceil(seconds / pause_s)):
            if is_done() or self._closed.wait(pause_s):
                return


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _key(rank: int) -> str:
    return f"watch/{rank}"
