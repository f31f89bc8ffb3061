"""Blocks of a forward under `torch.no_grad()` and `torch.autocast()`: fused as in serial rounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.precision import FP32, FP64
from tests.support import assert_learners_equal, features, make_tasks, plan


class Layer(nn.Module):
    """A linear layer and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("norms", torch.ones(3))


class SpectralNorm(Layer):
    """What divides the weights moves without a gradient."""

    @torch.no_grad()
    def measure(self):
        self.norms.mul_(0.5).add_(self.linear.weight.norm(dim=1))

    def forward(self, x):
        self.measure()
        return nn.functional.linear(x, self.linear.weight / self.norms.unsqueeze(1))


class Nested(Layer):
    """A gradient inside a block without, and the other way round."""

    def forward(self, x):
        with torch.no_grad():
            fixed = self.linear(x)
            with torch.enable_grad():
                learned = self.linear(x).tanh()
                with torch.set_grad_enabled(False):
                    fixed = fixed + learned
        return fixed * learned


class Rotary(Layer):
    """As Llama makes its angles: without a gradient, and not in a lower precision."""

    @torch.no_grad()
    def angles(self, x):
        with torch.autocast("cpu", enabled=False):
            return (self.linear.weight @ x.mT).cos()

    def forward(self, x):
        return self.linear(x) * self.angles(x).mT.to(x.dtype)


class Autocast(Layer):
    """Half of it in bfloat16."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                high = low.float() @ self.linear.weight[:, :3]
        return low.float() + high.softmax(-1)


class ParametrizedSpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))

    def forward(self, x):
        return self.linear(x)


def after_rounds(network, executor, precision):
    tasks = make_tasks(network, data=features(32), order="blocks", precision=precision)
    runner = EXECUTORS[executor](tasks)
    for index in range(4):
        runner.submit(plan(tasks, index, 0.3))
    runner.drain()
    runner.close()
    return tasks.bank


@pytest.mark.parametrize("executor", ["threads", "fused", "fused_threads"])
@pytest.mark.parametrize("network", [SpectralNorm, Nested, Rotary, ParametrizedSpectralNorm])
def test_blocks_without_a_gradient_have_none_in_every_executor(network, executor):
    serial, other = (after_rounds(network, each, FP64) for each in ("serial", executor))
    assert_learners_equal(other, serial)


def test_autocast_in_forward_casts_as_in_serial_rounds():
    serial, fused = (after_rounds(Autocast, executor, FP32) for executor in ("serial", "fused"))
    assert_learners_equal(fused, serial, 1e-6)


def test_parameter_that_is_only_read_without_a_gradient_gets_none():
    class Frozen(Layer):
        def forward(self, x):
            with torch.no_grad():
                return x @ self.linear.weight.mT

    tasks = make_tasks(Frozen, order="blocks")
    graph = FusedGraph(tasks.bank.template, tasks.feed.batch(0).inputs, tasks.bank)
    assert not graph.run(tasks.feed.batches((0, 4)).inputs, shared=False).requires_grad
