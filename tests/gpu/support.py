"""Engines on the GPU for tests, and devices that count what they are asked for."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.data.build import make_feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.graphs import CudaStreams
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.row_update import TorchUpdate
from tests.support import assert_learners_equal, features, norm_model, plan

IMAGES = features(512, (3, 6, 6))
IS_SIMULATED = "SIMULATED_CUDA_LIBRARY" in os.environ  # see tests/simulated_cuda
needs_gpu = pytest.mark.skipif(IS_SIMULATED, reason="a simulated device has no NVML, profiler or time")
slow_if_simulated = pytest.mark.slow if IS_SIMULATED else lambda test: test
HAS_KERNELS = not IS_SIMULATED or os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="on a simulated device kernels need TRITON_INTERPRET=1")


def tasks_on_cuda(
    make_model=norm_model, optimizer=SGD(), rule=SMA(), precision=FP64, num_learners=3, order=None, data=IMAGES,
    batch_size=4, device="cuda", compares=False, one_row=False, collective=None,
):  # fmt: skip
    """An engine on the GPU, or the same one on another device; weights, batches and order follow from seeds."""
    collective = collective or Collective()
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    model = make_model().to(place)
    bank = ReplicaBank(
        model, num_learners, device=place, precision=precision, state_names=optimizer.state_names, order=order,
        gradient_mean=rule.gradient_mean, matrices=optimizer.matrices(model), groups=optimizer.group_numbers(model),
        one_row=one_row, num_devices=collective.num_devices,
    )  # fmt: skip
    return RoundTasks(
        bank,
        update=TorchUpdate(optimizer, rule),  # on CPU too: it is the reference
        feed=make_feed(
            data, batch_size, 0, place, channels_last=True, dtype=precision.compute, kernels=device == "cuda"
        ),
        loss=nn.functional.cross_entropy,
        seed=0,
        collective=collective,
        compares=compares,
    )


def run(executor, tasks, num_rounds, rate=lambda n: 0.05):
    """Run rounds; returns every (loss, correct predictions)."""
    runner = executor(tasks)
    try:
        outcomes = [o for n in range(num_rounds) for o in runner.submit(plan(tasks, n, rate(n)))]
        outcomes += runner.drain()
    finally:
        runner.close()
    return [pair for o in outcomes for pair in zip(o.losses, o.num_correct, strict=True)]


def assert_as_serial(executor, num_rounds, rate=lambda n: 0.05, tolerance=1e-8, kind=None, **options):
    """Rounds by an executor, on a device of a kind, are those of `serial`. Returns that device and the tasks."""
    ours, reference = (tasks_on_cuda(**options) for _ in range(2))
    device = (kind or Counting)(ours.bank.device)
    found = run(lambda tasks: executor(tasks, device), ours, num_rounds, rate)
    expected = run(SerialExecutor, reference, num_rounds, rate)
    assert_learners_equal(ours.bank, reference.bank, tolerance)
    if ours.bank.precision is FP64:
        assert found == [(pytest.approx(loss, rel=tolerance), right) for loss, right in expected]
    return device, ours


class Counting(CudaStreams):
    """Counts captures and replays."""

    def __init__(self, device):
        super().__init__(device)
        self.captured, self.num_replays = [], 0

    def capture(self, name, body, stream, pool):
        self.captured.append(name)
        return super().capture(name, body, stream, pool)

    def replay(self, graph, stream):
        self.num_replays += 1
        super().replay(graph, stream)


class Eager(CudaStreams):
    """Refuses every capture before it begins, which CUDA does not notice."""

    def capture(self, name, body, stream, pool):
        raise RuntimeError("not here")


class Twins(Collective):
    """Two devices that do the same. Its sums may not be captured, as those of NCCL are not."""

    num_devices = 2

    def __init__(self):
        self.num_sums = 0

    def all_reduce_sum(self, values):
        assert not torch.cuda.is_current_stream_capturing(), "a sum is captured"
        self.num_sums += 1
        values.mul_(2)
