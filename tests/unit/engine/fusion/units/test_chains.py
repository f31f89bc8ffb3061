"""Linear layers run as one step in C where they are a chain; what looks like one is left alone, and learns as alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.fusion.units import chains
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.native import dense
from tests.support import features, make_tasks, run

pytestmark = pytest.mark.skipif(not dense.serves(torch.zeros(1)), reason="there is no C compiler")


class Tied(nn.Module):
    """One layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.own(self.own(x)))


class WrittenOutput(nn.Module):
    """What a chain gives is written after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        own = self.first(x)
        own.mul_(2)
        return self.head(own)


class Sequences(WrittenOutput):
    """Layers of sequences, whose values are read twice."""

    def forward(self, x):
        own = torch.sigmoid(self.first(x.view(-1, 1, 6).expand(-1, 2, -1)))
        return self.head(own + functional.softplus(own)).mean(1)


class BroadcastBias(nn.Module):
    """One bias for all outputs, which C code would read beyond."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(1))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.relu(functional.linear(x, self.weight, self.bias)))


class WrittenSource(nn.Module):
    """What a chain takes is a view of what is written before the chain's last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x):
        source = x.view(-1, 2, 3) * 2
        own = self.first(source.transpose(1, 2))  # by torch of a copy
        source.mul_(3)
        return self.head(torch.relu(own)).mean(1) + source.mean((1, 2))[:, None]


@pytest.mark.parametrize(
    ("make", "lengths"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.Linear(4, 3)), [3]),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.GELU(), nn.Linear(5, 3, bias=False)), [1, 1]),
        (lambda: nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 3)), [1]),  # one is too wide
        (Tied, [1]),
        (WrittenOutput, [1]),
        (Sequences, [1, 1]),
        (BroadcastBias, [1]),
        (WrittenSource, [1]),
    ],
)
def test_chains_of_three_learners_equal_serial(make, lengths):
    def seeded():
        torch.manual_seed(2)
        return make()

    tasks, reference = (
        make_tasks(seeded, num_learners=3, data=features(24, (6,), 3), order="blocks", precision=FP32) for _ in range(2)
    )
    runner = FusedExecutor(tasks)
    found = [step.rule.args[0] for step in runner._pass.graph.steps if step.together]
    assert [len(chain.layers.functions) for chain in found] == lengths
    run(runner, tasks, 3)
    run(SerialExecutor(reference), reference, 3)
    for learner in range(3):
        pairs = zip(*(each.bank.module(learner).parameters() for each in (tasks, reference)), strict=True)
        for own, wanted in pairs:
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)


def test_layers_of_many_products_are_left_to_all_cores(monkeypatch):
    monkeypatch.setattr(chains, "_MOST_PRODUCTS", 4 * 6 * 5 - 1)  # those of the first layer, with batches of 4
    make = lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))  # noqa: E731
    tasks = make_tasks(make, num_learners=2, data=features(24, (6,), 3), order="blocks", precision=FP32)
    steps = FusedExecutor(tasks)._pass.graph.steps
    assert [len(step.rule.args[0].layers.functions) for step in steps if step.together] == [1]
