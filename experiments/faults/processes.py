"""Training in processes of its own, to be killed: forked from a server that has imported torch, to start soon."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from crossbow_py.train import __main__ as train
from experiments.bench.machine import free_port

_PATIENCE_S = 60.0
_PRELOADED = ["torch", "crossbow_py.train.__main__"]


@dataclass(frozen=True)
class Start:
    processes: tuple[ForkServerProcess, ...]

    @property
    def runs(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None, "a process that was started has a number"
            os.kill(pid, signal.SIGKILL)

    def wait(self, patience_s: float = _PATIENCE_S) -> list[int | None]:
        """Exit codes by rank; None, and then killed, for a process that does not end."""
        deadline_s = time.monotonic() + patience_s
        codes = []
        for process in self.processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            codes.append(process.exitcode)
            process.kill()
            process.join()
        return codes


def start(arguments: Sequence[str], log: Path, num_ranks: int = 1) -> Start:
    """Start `python -m crossbow_py.train ARGUMENTS` on so many ranks; what they say is appended to `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    port = free_port()
    environments = [rank_environment(rank, num_ranks, port) if num_ranks > 1 else {} for rank in range(num_ranks)]
    processes = tuple(
        context.Process(target=train_here, args=(list(arguments), environment, str(log)))
        for environment in environments
    )
    for process in processes:
        process.start()
    return Start(processes)


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The environment that a launcher on this host gives a rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    numbers = {name: str(value) for name, value in names.items()}
    return {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def train_here(arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """Be that process: the output goes to the log, and the exit code is training's."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.exit(train.main(arguments))
