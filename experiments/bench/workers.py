"""A process a side, so that thread pools, allocator settings and caches of one side never meet those of another.

Processes are forked from a server that has imported torch and little else, and has not touched CUDA: they start in
milliseconds, and as clean.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any
from unittest.mock import patch

import torch

from crossbow_py.core.errors import CrossbowError
from experiments.bench.gate import Failure, FinishedError, Gate, Ready, Visit, Window
from experiments.bench.machine import ROOT
from experiments.bench.sides.side import Side
from experiments.bench.workloads import Effort, Workload

_END_S = 10.0
# torch's optimizers import the front of its compiler when they first step, which takes seconds in every process.
_PRELOADED = ["torch", "torch._dynamo"]

# What trains behind the gate until it raises FinishedError.
Body = Callable[[Side, Workload, Gate, Effort], None]


class SideError(Exception):
    """A side cannot be measured: why, in a sentence, or its process ended and its error is on stderr."""


class SideProcess:
    """A side in a process of its own, blocked but for its windows. Close it, or use it as a context manager.

    Args:
        body: what its process does.
        side: the side.
        workload: what it trains.
        effort: how long it may take to find what suits it.
        patience_s: how long to wait until it is built and has tuned itself; None for as long as it takes.

    Attributes:
        side: the same, with what it chose for itself.
        ready: what it said when it was built.

    Raises:
        SideError: the side cannot be had.
    """

    def __init__(
        self, body: Body, side: Side, workload: Workload, effort: Effort, patience_s: float | None = None
    ) -> None:
        self._label = side.label
        context = process_context(body.__module__)
        self._connection, theirs = context.Pipe()
        arguments = (theirs, side, workload, effort, body)
        self._process = context.Process(target=serve, args=arguments, name=side.label, daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()  # so that this end sees the end of the file when the process dies
        try:
            self.ready: Ready = self._receive(patience_s)
        except BaseException:
            self.close()
            raise
        self.side = side.chosen(self.ready)

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def window(self, visit: Visit, patience_s: float | None = None) -> Window:
        """Let the side train for a window; blocks until it is over or `patience_s` are. Raises SideError."""
        with suppress(OSError):  # it died; `_receive` learns the reason
            self._connection.send(visit)
        window: Window = self._receive(patience_s)
        return window

    def dismiss(self) -> None:
        """Tell the process to end, and do not wait for it."""
        with suppress(OSError):
            self._connection.send(None)

    def close(self) -> None:
        self.dismiss()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()
        self._connection.close()

    def _receive(self, patience_s: float | None) -> Any:
        try:
            if not self._connection.poll(patience_s):
                self._process.terminate()
                raise SideError(f"side {self._label} took longer than the {patience_s:.0f} s there were and was ended.")
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise SideError(f"side {self._label} ended by itself; its error is above.") from error
        if isinstance(message, Failure):
            raise SideError(f"side {self._label}: {message.reason}")
        return message


def process_context(module: str) -> BaseContext:
    """Return how processes that work in `module` are made. Their server knows this checkout and has the module."""
    if sys.platform != "linux":  # elsewhere, system libraries do not stand being forked
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED, module])
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        forkserver.ensure_running()
    return context


def serve(connection: Connection[Any, Any], side: Side, workload: Workload, effort: Effort, body: Body) -> None:
    """Train behind the gate, in the side's process, until no more windows are wanted or nobody is there to want any.

    Ctrl-C reaches every process of the terminal; it is the parent's to answer, by closing its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    synchronize: Callable[[], None] = torch.cuda.synchronize if workload.device == "cuda" else lambda: None
    with suppress(FinishedError, BrokenPipeError):
        try:
            body(side, workload, Gate(connection, synchronize), effort)
        except CrossbowError as error:
            connection.send(Failure(str(error)))
