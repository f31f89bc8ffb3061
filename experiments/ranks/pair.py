"""Two processes, each pinned to a core, that are asked for windows from outside."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from crossbow_py.core.host import LoadSnapshot, foreign_share, usable_core_ids
from experiments.bench.machine import free_port
from experiments.bench.windows import MAX_FOREIGN_SHARE

NUM_RANKS = 2
_REPLY_WITHIN_S = 300.0


@dataclass(frozen=True)
class Measured:
    """A rank's rounds of a window and their seconds, and the processor time that it took."""

    wall_s: float
    rounds: int = 0
    own_s: float = 0.0

    @property
    def round_s(self) -> float:
        return self.wall_s / self.rounds


def answer(connection: Connection, own: object) -> None:
    """In a rank's process: do what is asked for, a method of `own`, until it is nothing more."""
    while (asked := connection.recv()) is not None:
        method, arguments = asked
        before_s = time.process_time()
        measured: Measured = getattr(own, method)(**arguments)
        connection.send(replace(measured, own_s=time.process_time() - before_s))


class RankPair:
    """The two processes, from the outside. Use as a context manager.

    Args:
        serve: what a process does, given its rank, its core, the port at which ranks meet and its end of a pipe.

    Attributes:
        dropped: windows so far that were of no use, as other programs took too much of the cores.
    """

    def __init__(self, serve: Callable[[int, int, int, Connection], None]) -> None:
        self.dropped, self._serve = 0, serve

    def __enter__(self) -> RankPair:
        cores, port = sorted(usable_core_ids()), free_port()
        assert len(cores) >= NUM_RANKS, "two ranks need a core each"
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(NUM_RANKS)]
        self._connections = [own for own, _ in pipes]
        self._processes = [
            context.Process(target=self._serve, args=(rank, cores[rank], port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # its rank is gone
                connection.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()

    def ask(self, method: str, **arguments: Any) -> list[Measured]:
        """Ask both ranks at once, and wait for their answers."""
        for connection in self._connections:
            connection.send((method, arguments))
        return [self._answer(connection) for connection in self._connections]

    def window(self, attempts: int = 4, **arguments: Any) -> list[Measured] | None:
        """One window on both ranks; tried again when others were busy, None when they were every time."""
        for _ in range(attempts):
            before = LoadSnapshot.take()
            answers = self.ask("window", **arguments)
            after = LoadSnapshot.take()
            own_s = after.own_s + sum(answer.own_s for answer in answers)
            share = foreign_share(before, replace(after, own_s=own_s))
            if share is None or share <= MAX_FOREIGN_SHARE:
                return answers
            self.dropped += 1
            time.sleep(0.5)
        return None

    @staticmethod
    def _answer(connection: Connection) -> Measured:
        if not connection.poll(_REPLY_WITHIN_S):
            raise TimeoutError(f"a rank has not answered within {_REPLY_WITHIN_S:.0f} s.")
        answer: Measured = connection.recv()
        return answer
