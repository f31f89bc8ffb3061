"""Engines on the GPU for tests, and devices that count what they are asked for."""

from __future__ import annotations

import torch
from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.data.build import make_feed
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.device.graphs import CudaStreams
from crossbow_py.engine.modules.precision import FP64
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.engine.update.row_update import TorchUpdate
from tests.support import features, norm_model, plan

IMAGES = features(512, (3, 6, 6))


def tasks_on_cuda(
    make_model=norm_model, optimizer=SGD(), rule=SMA(), precision=FP64, num_learners=3, order=None, data=IMAGES,
    batch_size=4,
):  # fmt: skip
    """An engine on the GPU; weights, batches and order follow from seeds."""
    place = torch.device("cuda", torch.cuda.current_device())
    bank = ReplicaBank(
        make_model().to(place), num_learners, device=place, precision=precision, state_names=optimizer.STATE,
        order=order,
    )  # fmt: skip
    return RoundTasks(
        bank,
        update=TorchUpdate(optimizer, rule),
        feed=make_feed(data, batch_size, 0, place, channels_last=True, dtype=precision.compute, kernels=True),
        loss=nn.functional.cross_entropy,
        seed=0,
        collective=Collective(),
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


class Batches(Feed):
    """Another feed's batches, in one step alone."""

    def __init__(self, feed):
        super().__init__(feed.num_samples, feed.batch_size)
        self._feed = feed

    def batch(self, start):
        return self._feed.batch(start)

    def batches(self, starts):
        return self._feed.batches(starts)

    def evaluation_batches(self, batch_size, first=0, step=1):
        return self._feed.evaluation_batches(batch_size)


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
