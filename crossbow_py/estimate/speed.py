"""The speed of training and loading on this machine: a few real steps of one learner, and a few real samples."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from crossbow_py.core.host_randomness import kept_generators
from crossbow_py.data.datasets import MapStyleDataset
from crossbow_py.data.streaming.streamed_data import Key, StreamedData
from crossbow_py.engine.device.host import intra_op_threads
from crossbow_py.engine.modules.precision import cast_module
from crossbow_py.engine.sizing.memory import Job, Sample
from crossbow_py.train.checks.fatal_modules import refusing_fatal_modules

_BUDGET_S = 2.0
_MOST_RUNS = 5

Clock = Callable[[], float]


def step_seconds(
    make_model: Callable[[], nn.Module], sample: Sample, job: Job, batch_size: int, clock: Clock = time.perf_counter
) -> float:
    """Return the seconds a sample of a forward and a backward pass, the best of a few, on one core of this machine.

    It is one core, because learners that run side by side use one each. Raises UserError for a model whose backward
    pass would end the process.
    """
    with kept_generators(), intra_op_threads(1):
        model = cast_module(make_model(), job.precision).train()
        inputs, targets = (tensor.zero_() for tensor in sample.batch(batch_size, job.channels_last))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with refusing_fatal_modules(model):
            model(inputs)

        def step() -> None:
            loss = job.loss(model(inputs).to(job.precision.master), targets)
            torch.autograd.grad(loss, trained, allow_unused=True)

        return _shortest_s(step, clock) / batch_size


def fetch_seconds(
    data: StreamedData | MapStyleDataset, num_samples: int = 8, clock: Clock = time.perf_counter
) -> float:
    """Return the seconds in which one worker loads a sample on this machine, the best of a few batches."""
    order = itertools.count()

    def fetch() -> None:
        ids = [next(order) % len(data) for _ in range(num_samples)]
        if isinstance(data, StreamedData):
            data.fetch([Key(0, sample) for sample in ids], seed=0, training=True, on_sample=lambda _: None)
            return
        for sample in ids:
            data[sample]

    with kept_generators():
        return _shortest_s(fetch, clock) / num_samples


def _shortest_s(action: Callable[[], Any], clock: Clock) -> float:
    """Return the shortest time of two runs or more, of which the first also initialises."""
    begun, best = clock(), float("inf")
    for run in range(_MOST_RUNS):
        if run > 1 and clock() - begun > _BUDGET_S:
            break
        before = clock()
        action()
        best = min(best, clock() - before)
    return best
