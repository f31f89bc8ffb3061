"""Blocks of a forward under `torch.no_grad()` and `torch.autocast()`: fused as in serial rounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.modules.precision import BF16, FP32, FP64
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


def low(enabled=True, dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


class Layers(nn.Module):
    """Two layers and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)


class OneAfterTheOther(Layers):
    def forward(self, x):
        with low():
            y = self.first(x)
        with low():
            y = self.second(y)
        with low():
            return self.head(y).float()


class OfTwoFormats(Layers):
    def forward(self, x):
        with low():
            y = self.first(x)
        with low(dtype=torch.float16):
            y = self.second(y)
        return self.head(y.float())


class OffTwice(Layers):
    def forward(self, x):
        with low():
            y = self.first(x)
            with low(enabled=False):
                y = y.float().tanh()
            with low(enabled=False):
                y = y.exp()
            return self.head(y).float()


class OffOnAnotherDevice(Layers):
    """As code that was written for a GPU does."""

    def forward(self, x):
        with low():
            y = self.first(x)
            with torch.autocast("cuda", enabled=False):
                y = self.second(y)
            return self.head(y).float()


class Decorated(Layers):
    @low()
    def features(self, x):
        return self.second(self.first(x))

    @low()
    def forward(self, x):
        return self.head(self.features(x)).float()


class FixedInside(Layers):
    """Stops gradients in a block, and goes on."""

    def forward(self, x):
        with low():
            y = self.first(x)
            with torch.no_grad():
                fixed = self.second(x) + y
            return self.head(y * fixed).float()


class FixedAtTheEnd(Layers):
    def forward(self, x):
        with low():
            y = self.first(x)
            with torch.no_grad():
                fixed = self.second(x)
        return self.head((y * fixed).to(x.dtype))


class LearnedInsideFixed(Layers):
    def forward(self, x):
        with low():
            y = self.first(x)
            with torch.no_grad():
                fixed = self.second(x)
                with torch.enable_grad():
                    y = self.second(y)
                fixed = fixed + self.second(x)
            return self.head(y * fixed).float()


class FixedInsideOff(Layers):
    def forward(self, x):
        with low():
            y = self.first(x)
            with low(enabled=False):
                y = y.to(x.dtype)
                with torch.no_grad():
                    fixed = self.second(x).exp()
                y = self.second(y)
            return self.head(y * fixed).float()


class OneAfterTheOtherFixed(Layers):
    def forward(self, x):
        with torch.no_grad():
            with low():
                fixed = self.first(x)
            with low():
                fixed = self.second(fixed)
        with low():
            return self.head(x * fixed).float()


class SharedLayer(Layers):
    """A layer taken three times, of which autocast keeps one cast, and a weight that is read past autocast."""

    def forward(self, x):
        with low():
            y = self.first(self.first(x))
            with low():
                y = self.first(y)
            with low(enabled=False):
                y = y.float() @ self.first.weight
            y = y * self.first.weight.to(torch.bfloat16).sum() + self.first.weight.sum()
        return self.head(y)


class RotaryLayers(Layers):
    """As every layer of Llama makes its angles."""

    def angles(self, x):
        with torch.autocast(device_type="cpu", enabled=False):
            angles = torch.arange(4.0) * x.float()
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def forward(self, x):
        for layer in (self.first, self.second):
            (cos, sin), (again, _) = self.angles(x), self.angles(x)
            x = layer(x) * cos + x.flip(-1) * sin * again
        return self.head(x)


class RotaryLayersFixed(RotaryLayers):
    @torch.no_grad()
    def angles(self, x):
        return super().angles(x)


class RotaryLayersLow(RotaryLayersFixed):
    def forward(self, x):
        with low():
            return super().forward(x).float()


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


@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda precision: precision.name)
@pytest.mark.parametrize(
    "network",
    [
        OneAfterTheOther, OffOnAnotherDevice, Decorated, FixedInside, LearnedInsideFixed, OneAfterTheOtherFixed,
        RotaryLayers, RotaryLayersFixed, RotaryLayersLow,
    ],
)  # fmt: skip
def test_autocast_blocks_beside_and_in_others_learn_as_in_serial_rounds(network, precision):
    serial, fused = (after_rounds(network, executor, precision) for executor in ("serial", "fused"))
    assert_learners_equal(fused, serial, 1e-6)


@pytest.mark.parametrize("network", [OfTwoFormats, OffTwice, FixedAtTheEnd, FixedInsideOff, SharedLayer])
def test_autocast_blocks_that_return_their_format_learn_as_in_serial_rounds(network):
    serial, fused = (after_rounds(network, executor, FP32) for executor in ("serial", "fused"))
    assert_learners_equal(fused, serial, 1e-6)


def test_gradient_stopped_in_autocast_is_that_of_plain_pytorch():
    tasks = make_tasks(FixedInside, num_learners=1, order="blocks", precision=FP32)
    inputs, template = tasks.feed.batch(0).inputs, tasks.bank.template
    graph = FusedGraph(template, inputs, tasks.bank)
    graph.run(inputs.unsqueeze(0), shared=False).square().sum().backward()
    plain = FixedInside()
    plain(inputs).square().sum().backward()
    assert plain.second.weight.grad is None
    assert graph.trained["second.weight"].grad is None
    for name in ("first.weight", "head.weight"):
        torch.testing.assert_close(graph.trained[name].grad[0], plain.get_parameter(name).grad)


def test_parameter_that_is_only_read_without_a_gradient_gets_none():
    class Frozen(Layer):
        def forward(self, x):
            with torch.no_grad():
                return x @ self.linear.weight.mT

    tasks = make_tasks(Frozen, order="blocks")
    graph = FusedGraph(tasks.bank.template, tasks.feed.batch(0).inputs, tasks.bank)
    assert not graph.run(tasks.feed.batches((0, 4)).inputs, shared=False).requires_grad
