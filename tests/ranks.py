"""Runs a function on several ranks: processes with gloo between them, as torchrun would start them.

The processes are forked from a server that has imported torch once, so that a rank costs a tenth of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch

from crossbow_py.distributed.process_group import joined
from crossbow_py.distributed.settings import DistributedSettings
from experiments.bench.machine import free_port

PATIENCE_S = 60.0
# With them what torch.export would import in every rank that fuses, which takes seconds.
_EXPORT = ["torch.export._trace", "torch._functorch.aot_autograd", "torch._inductor.decomposition"]
_PRELOADED = ["torch", "crossbow_py", "tests.ranks", *_EXPORT]


@dataclass(frozen=True)
class Raised:
    """What a rank's function raised."""

    kind: str
    text: str
    exit_code: int | None


def on_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 30.0, num_nodes: int = 1
) -> list[Any]:
    """What `function(ranks, *arguments)`, of a module, returns on each rank; what it raises as `Raised`."""
    with started(function, num_ranks, *arguments, timeout_s=timeout_s, num_nodes=num_nodes) as processes:
        return [answer_of(*each) for each in processes]


@contextlib.contextmanager
def started(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 30.0, num_nodes: int = 1
) -> Iterator[list[tuple[ForkServerProcess, Connection]]]:
    """The processes, killed in the end."""
    context = _context()
    port, processes = free_port(), list[tuple[ForkServerProcess, Connection]]()
    try:
        for rank in range(num_ranks):
            mine, its = context.Pipe(duplex=False)
            environment = _environment(rank, num_ranks, num_nodes, port)
            process = context.Process(target=_run, args=(environment, timeout_s, its, function, arguments))
            process.start()
            its.close()
            processes.append((process, mine))
        yield processes
    finally:
        for process, connection in processes:
            process.kill()
            process.join()
            connection.close()


def answer_of(process: ForkServerProcess, connection: Connection) -> Any:
    """What a rank has returned or `Raised`; its exit code when it ended without a word."""
    try:
        if not connection.poll(PATIENCE_S):
            raise AssertionError("a rank neither answers nor ends")
        answer = connection.recv()
    except EOFError:
        process.join(PATIENCE_S)
        return process.exitcode
    process.join(PATIENCE_S)
    return answer


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _environment(rank: int, num_ranks: int, num_nodes: int, port: int) -> dict[str, str]:
    local = num_ranks // num_nodes
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _run(
    environment: dict[str, str],
    timeout_s: float,
    connection: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        with joined(DistributedSettings(timeout_s=timeout_s), "cpu") as ranks:
            connection.send(function(ranks, *arguments))
    except BaseException as error:
        with contextlib.suppress(Exception):
            traceback.print_exc()
        connection.send(Raised(type(error).__name__, str(error), getattr(error, "exit_code", None)))
