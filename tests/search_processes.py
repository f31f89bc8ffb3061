"""The command line's searches in processes of their own, to be killed and to share a search."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest import mock

import torch

from crossbow_py.packs import trial_registry
from crossbow_py.packs.width import Width
from crossbow_py.search import __main__ as search
from experiments.bench.machine import free_port
from experiments.faults.processes import rank_environment
from tests.searches import events, merged, report, segments, values
from tests.training_processes import PATIENCE_S

# 13 segments in three rungs; of all executors this one leaves a trial the same whoever is beside it.
NINE_TRIALS = [
    "+experiment=search_digits", "model.hidden=[16]", "device=cpu", "precision=fp32", "executor=serial",
    "num_trials=9", "max_epochs=9", "method=successive_halving", "batch_size=4",
]  # fmt: skip
NUM_SEGMENTS = 9 + 3 + 1
Outcome = tuple[dict[int, dict[str, float]], int, float, dict[str, object]]
_PACK_SIZE = 4


@contextlib.contextmanager
def started(
    folder: Path, *options: str, environment: Mapping[str, str] | None = None, meeting: Barrier | None = None
) -> Iterator[ForkServerProcess]:
    """`python -m crossbow_py.search`, in `folder`'s parent and writing to it; killed in the end, if it runs."""
    context = _fork_server()
    context.set_forkserver_preload([__name__, "crossbow_py.search.searcher", "crossbow_py.search.report.tensorboard"])
    arguments = merged(NINE_TRIALS, (f"output_dir={folder.name}", *options))
    where = str(folder.parent)
    process = context.Process(
        target=_search_here, args=(arguments, where, f"{folder}.log", dict(environment or {}), meeting)
    )
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def started_ranks(folder: Path, *options: str, num_ranks: int = 2) -> Iterator[list[ForkServerProcess]]:
    """The same as ranks of this host, without a launcher that would end all with one; all come before any trains."""
    port, meeting = free_port(), _fork_server().Barrier(num_ranks)
    with contextlib.ExitStack() as stack:
        environments = [rank_environment(rank, num_ranks, port) for rank in range(num_ranks)]
        yield [
            stack.enter_context(started(folder, *options, environment=each, meeting=meeting)) for each in environments
        ]


def search_in(folder: Path, *options: str) -> int | None:
    """The exit code of a search that is left alone."""
    with started(folder, *options) as process:
        return ended(process)


def ended(process: ForkServerProcess) -> int | None:
    """Its exit code, when it ends."""
    process.join(PATIENCE_S)
    return process.exitcode


def _fork_server() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


def _search_here(
    arguments: Sequence[str], where: str, log: str, environment: Mapping[str, str], meeting: Barrier | None
) -> None:
    """Be that process: packs are of one size without measuring, and the exit code is the search's."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(where)
    os.environ.update(environment)
    torch.set_num_threads(1)
    width = Width(_PACK_SIZE, {("serial", 1): 1.0, ("serial", _PACK_SIZE): 2.0}, "Packs of 4, for a test.")
    waiting = [meeting] if meeting else []

    def measured(*_: object) -> tuple[Width, list[str]]:
        while waiting:
            waiting.pop().wait(PATIENCE_S)
        return width, []

    with mock.patch.object(trial_registry, "measured_width", measured):
        sys.exit(search.main(arguments))


def outcome(folder: Path) -> Outcome:
    """Every value measured, and the best trial; each segment has one result."""
    found = report(folder)
    assert found["status"] == "finished"
    assert len(segments(folder)) == len(set(segments(folder))) == NUM_SEGMENTS
    best = found["best"]
    return values(folder), best["trial"], best["value"], best["params"]


def workers(folder: Path) -> Counter[str]:
    """How many segments each has finished."""
    return Counter(worker for event, _, worker in events(folder) if event == "finished")
