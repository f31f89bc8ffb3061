"""A process a side, so that thread pools, allocator settings and caches of one side never meet those of another."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from experiments.throughput.gate import FinishedError, Gate, Ready, Window
from experiments.throughput.sides import Side, run_side
from experiments.throughput.workloads import Workload

_END_S = 10.0


class SideError(Exception):
    """A side's process ended by itself; what it had to say is on stderr."""


class SideProcess:
    """A side in a process of its own, blocked but for its windows. Close it, or use it as a context manager."""

    def __init__(self, side: Side, workload: Workload) -> None:
        """Start the process and wait until the side is built and has tuned itself."""
        self.side = side
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, side, workload), name=side.label, daemon=True)
        self._process.start()
        theirs.close()  # so that this end sees the end of the file when the process dies
        self.ready: Ready = self._receive()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def window(self, seconds: float) -> Window:
        """Let the side train for a window; blocks until it is over. Raises SideError."""
        self._connection.send(seconds)
        window: Window = self._receive()
        return window

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
        self._connection.close()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError as error:
            raise SideError(f"side {self.side.label} failed; its error is above.") from error


def serve(connection: Connection[Any, Any], side: Side, workload: Workload) -> None:
    """What the process does: train behind the gate until no more windows are wanted, or nobody is there to want any.

    Ctrl-C reaches every process of the terminal; it is the parent's to answer, by closing its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    synchronize: Callable[[], None] = torch.cuda.synchronize if workload.device == "cuda" else lambda: None
    with suppress(FinishedError, BrokenPipeError):
        run_side(side, workload, Gate(connection, synchronize))
