"""`compiled`: one model through torch.compile and into one CUDA graph, at the batch size of all learners together.

This is the honest side to compare with: what a device gives one model when launching kernels costs nothing. K learners
with batch size b stand against it at batch size K · b. Inductor compiles the feed's gather and normalisation, the model
and the loss, forward and backward; the update is torch's fused SGD, on float32 masters where the weights are bfloat16.
Compiling comes first, then the capture, which holds a whole training step.

To compile a deep network takes Inductor half a minute or more of mostly one core. So the suite compiles ahead, several
steps at a time, into Inductor's cache on disk. What fails there fails again, and is told, when the side itself starts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import torch

from crossbow_py.engine.modules.precision import PrecisionName
from experiments.bench.gate import Gate, Ready
from experiments.bench.machine import usable_cores
from experiments.bench.sides.captured import captured, how, model_step, train_for_ever
from experiments.bench.workers import process_context
from experiments.bench.workloads import Workload

COMPILER = "inductor"
_CORES_EACH = 2


def compiled(precision: str, num_learners: int, workload: Workload, gate: Gate) -> None:
    """Train one model on as many images a step as `num_learners` learners take, for ever. Raises RuntimeError."""
    images = num_learners * workload.batch_size
    torch.set_num_threads(usable_cores())
    step = captured(model_step(precision, images, workload, COMPILER), workload.device)
    step()  # on a CPU, where nothing was captured, it is now that the compiler works
    gate.ready(Ready(torch.get_num_threads(), f"{COMPILER}, {how(workload.device)}"))
    train_for_ever(step, images, gate)


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
    context = process_context(__name__)
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_compile, args=(precision, images, workload), name=f"compile {workload.model}", daemon=True
    )
    process.start()
    return process


def _compile(precision: PrecisionName, images: int, workload: Workload) -> None:
    """Compile a step and run it once, so that Inductor's cache on disk has it. For a process of its own.

    Others compile at the same time, so what Inductor finds out by timing kernels is not kept.
    """
    import torch._inductor.config as inductor  # noqa: PLC0415 - takes seconds, and only here

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    inductor.compile_threads, inductor.autotune_local_cache = _CORES_EACH, False
    torch.set_num_threads(_CORES_EACH)
    with suppress(RuntimeError):
        model_step(precision, images, replace(workload, batch_size=images), COMPILER)()
        if workload.device == "cuda":
            torch.cuda.synchronize()
        return
    raise SystemExit(1)
