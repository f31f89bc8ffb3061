"""Compiles the steps of `compiled` before anything is measured, several at a time, into Inductor's cache on disk.

To compile a deep network takes Inductor half a minute or more of mostly one core: one by one within the models' time it
would leave no time for the rest. What fails here fails again, and is told, when the side itself starts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from crossbow_py.engine.modules.precision import PrecisionName
from experiments.common.machine import usable_cores
from experiments.throughput.one_model import compile_once
from experiments.throughput.workers import process_context
from experiments.throughput.workloads import Workload

_CORES_EACH = 2


def compile_ahead(precision: PrecisionName, jobs: Sequence[tuple[Workload, int]], limit_s: float) -> int:
    """Compile a step for each (workload, images a step), in that order, for `limit_s` at most.

    Returns how many were done. What is under way when the time is over is ended.
    """
    deadline_s = time.monotonic() + limit_s
    waiting, running = list(jobs), list[BaseProcess]()
    at_once = max(1, usable_cores() // _CORES_EACH)
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(precision, *waiting.pop(0)))
            ended = connection.wait([process.sentinel for process in running], max(0.0, deadline_s - time.monotonic()))
            if not ended:
                break
            done += sum(process.sentinel in ended and not process.exitcode for process in running)
            running = [process for process in running if process.sentinel not in ended]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join()
    return done


def _start(precision: PrecisionName, workload: Workload, images: int) -> BaseProcess:
    context = process_context()
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_compile, args=(precision, images, workload), name=f"compile {workload.model}", daemon=True
    )
    process.start()
    return process


def _compile(precision: PrecisionName, images: int, workload: Workload) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    with suppress(RuntimeError):
        compile_once(precision, images, workload, _CORES_EACH)
        return
    raise SystemExit(1)
