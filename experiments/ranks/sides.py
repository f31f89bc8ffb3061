"""The sides, in a rank's process: training by this package, alone or together, and DistributedDataParallel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from crossbow_py import SGD, Trainer
from crossbow_py.averaging import Crossbow
from crossbow_py.data.feed import Feed
from crossbow_py.distributed.process_group import joined
from crossbow_py.distributed.ranks import ALONE, Ranks
from experiments.bench.rounds import MarkedRounds, build_model, trainer_on_noise
from experiments.ranks.pair import Measured, answer

WARM_UP_ROUNDS = 2
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.001, 0.9, 1e-4
BUCKETS_MB = (1, 25)  # of DistributedDataParallel: several for a model of this size, and all in one
_NUM_IMAGES = 8192  # an epoch is longer than a window
_NEVER = 2**30


class Sides:
    """Every side as a method that trains `num_rounds` rounds, or steps, and says how long they took."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def prepare(self, model: str, batch_size: int) -> Measured:
        """Build them; the other methods come after it."""
        self._model, self._batch_size = model, batch_size
        self._trainers = {
            "sma": self._trainer(self._ranks, period=1),
            "apart": self._trainer(self._ranks, period=_NEVER),
            "alone": self._trainer(ALONE, period=1),
        }
        self._steps = {f"ddp_{size}": self._ddp(size) for size in BUCKETS_MB}
        return Measured(0.0)

    def window(self, side: str, num_rounds: int) -> Measured:
        """Both ranks begin together; the one that has nothing to do in `alone` sleeps."""
        self._ranks.sum([0.0])
        if side in self._steps:
            step = self._steps[side]
            for _ in range(WARM_UP_ROUNDS):
                step()
            begun_s = time.perf_counter()
            for _ in range(num_rounds):
                step()
            return Measured(time.perf_counter() - begun_s, num_rounds)
        if side == "alone" and not self._ranks.is_first:
            return Measured(0.0, num_rounds)
        trainer, marks = self._trainers[side], MarkedRounds()
        trainer.fit(max_rounds=WARM_UP_ROUNDS + num_rounds, after_round=marks)
        times = [mark.elapsed_s for mark in marks]
        return Measured(times[-1] - times[WARM_UP_ROUNDS - 1], num_rounds)

    def _trainer(self, ranks: Ranks, period: int) -> Trainer:
        return trainer_on_noise(
            self._model, _NUM_IMAGES, averaging=Crossbow(averaging_period=period), batch_size=self._batch_size,
            num_learners=1, executor="serial" if ranks is ALONE else "threads", device="cpu", precision="fp32",
            optimizer=SGD(learning_rate=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY), ranks=ranks,
        )  # fmt: skip

    def _ddp(self, bucket_mb: int) -> Callable[[], None]:
        """One step of the same model on the same batches: channels-last, no copies of gradients, no buffers sent."""
        feed: Feed = self._trainers["sma"].run.train_feed
        model = build_model(self._model).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        parallel = DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, forward_sync_buffers=False, bucket_cap_mb=bucket_mb
        )
        optimizer = torch.optim.SGD(
            model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True
        )
        position = self._ranks.rank * self._batch_size

        def step() -> None:
            nonlocal position
            batch = feed.batch(position)
            position += self._ranks.num_ranks * self._batch_size
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(batch.inputs), batch.targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step


def serve(rank: int, core: int, port: int, connection: Connection) -> None:
    """A rank's process, as a launcher starts it."""
    os.sched_setaffinity(0, {core})
    names: dict[str, Any] = {
        "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in names.items()})
    with joined(device="cpu") as ranks:
        torch.set_num_threads(1)
        answer(connection, Sides(ranks))
