"""`compiled`: one model through torch.compile and into one CUDA graph, at the batch size of all learners together.

This is the honest side to compare with: what a device gives one model when launching kernels costs nothing. K learners
with batch size b stand against it at batch size K · b. Inductor compiles the feed's gather and normalisation, the model
and the loss, forward and backward; the update is torch's fused SGD, on float32 masters where the weights are bfloat16.
Compiling comes first, then the capture, which holds a whole training step.

`mps_processes` has K processes, each with one model captured in the same way but not compiled; mps.py holds them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from experiments.common.machine import usable_cores
from experiments.throughput.captured import DeviceFeed, Step, captured, train_for_ever
from experiments.throughput.gate import Gate, Ready
from experiments.throughput.updates import bf16_update, plain_update
from experiments.throughput.workloads import Workload

COMPILER = "inductor"
_SGD = "fused"

LossOf = Callable[[Tensor], Tensor]


def compiled(precision: str, num_learners: int, workload: Workload, gate: Gate) -> None:
    """Train one model on as many images a step as `num_learners` learners take, for ever. Raises RuntimeError."""
    images = num_learners * workload.batch_size
    torch.set_num_threads(usable_cores())
    step = captured(model_step(precision, images, workload, COMPILER), workload.device)
    step()  # on a CPU, where nothing was captured, it is now that the compiler works
    gate.ready(Ready(torch.get_num_threads(), f"{COMPILER}, {how(workload.device)}"))
    train_for_ever(step, images, gate)


def mps_member(precision: str, workload: Workload, gate: Gate, pipes: str) -> None:
    """Train one of the models of `mps_processes` for ever; `pipes` is where their MPS daemon listens."""
    assert not torch.cuda.is_initialized(), "CUDA looks for the daemon once"  # type: ignore[no-untyped-call]
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = pipes
    torch.set_num_threads(1)
    step = captured(model_step(precision, workload.batch_size, workload, None), workload.device)
    gate.ready(Ready(1, how(workload.device)))
    train_for_ever(step, workload.batch_size, gate)


def how(device: str) -> str:
    """What became of a step, for a side's detail."""
    return "one CUDA graph a step" if device == "cuda" else "no CUDA graph"


def model_step(precision: str, images: int, workload: Workload, compiler: str | None) -> Step:
    """A training step of a fresh model on so many images; `compiler` is a backend of torch.compile."""
    torch.backends.cudnn.benchmark = True
    bf16 = precision == "bf16"
    model = workload.make_model().to(workload.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    update = bf16_update(model, _SGD) if bf16 else plain_update(list(model.parameters()), _SGD)
    feed = DeviceFeed(workload, images, torch.bfloat16 if bf16 else torch.float32, channels_last=True)

    def loss_of(picks: Tensor) -> Tensor:
        inputs, labels = feed.take(picks)
        return nn.functional.cross_entropy(model(inputs).float(), labels)

    loss = _through(compiler, loss_of)

    def step() -> None:
        loss(feed.next_picks()).backward()  # type: ignore[no-untyped-call]
        update()

    return step


def _through(compiler: str | None, function: LossOf) -> LossOf:
    if compiler is None:
        return function
    options: dict[str, Any] = {"backend": compiler, "dynamic": False, "fullgraph": True}
    return cast(LossOf, torch.compile(function, **options))


def compile_once(precision: str, images: int, workload: Workload, threads: int) -> None:
    """Compile a step and run it once, so that Inductor's cache on disk has it. For a process of its own.

    Others compile at the same time, so what Inductor finds out by timing kernels is not kept.
    """
    import torch._inductor.config as inductor  # noqa: PLC0415 - takes seconds, and only here

    inductor.compile_threads, inductor.autotune_local_cache = threads, False
    torch.set_num_threads(threads)
    model_step(precision, images, replace(workload, batch_size=images), COMPILER)()
    if workload.device == "cuda":
        torch.cuda.synchronize()
