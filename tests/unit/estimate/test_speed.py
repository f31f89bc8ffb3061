"""Timing on a made-up clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.sizing.memory import Job, Sample
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.estimate.speed import fetch_seconds, step_seconds

JOB = Job(nn.functional.cross_entropy, SGD(), SMA(), FP32)


class Clock:
    """Runs on by the given seconds with every look at it."""

    def __init__(self, steps: list[float]) -> None:
        self._steps: Iterator[float] = iter(steps)
        self.now = 0.0

    def __call__(self) -> float:
        self.now += next(self._steps, 0.0)
        return self.now


def test_step_seconds_are_those_of_the_best_step_by_sample() -> None:
    # A look at the beginning; then before and after each step, and one for what is left of the time.
    clock = Clock([0, 0, 9.0, 0, 0.4, 0])
    state = torch.random.get_rng_state()
    assert step_seconds(lambda: nn.Linear(4, 3), Sample((4,)), JOB, 8, clock) == pytest.approx(0.05)
    assert torch.equal(state, torch.random.get_rng_state())


def test_fetch_seconds_take_other_samples_each_time() -> None:
    class Items:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[int, int]:
            self.asked.append(index)
            return index, 0

    items = Items()
    assert fetch_seconds(items, num_samples=2, clock=Clock([0, 0, 3.0, 0, 0.5, 9.0])) == 0.25
    assert items.asked == [0, 1, 2, 3]
