"""Blocks of a forward under `torch.no_grad()` and `torch.autocast()`: fused as in serial rounds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.modules.precision import BF16, FP32, FP64
from tests.support import assert_learners_equal, features, make_tasks, run_rounds


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
    """Two layers and a head, taken by a function of the module and its inputs."""

    def __init__(self, take):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.take = take

    def forward(self, x):
        return self.take(self, x)


def one_after_the_other(m, x):
    with low():
        y = m.first(x)
    with low():
        y = m.second(y)
    with low():
        return m.head(y).float()


def of_two_formats(m, x):
    with low():
        y = m.first(x)
    with low(dtype=torch.float16):
        y = m.second(y)
    return m.head(y.float())


def off_twice(m, x):
    with low():
        y = m.first(x)
        with low(enabled=False):
            y = y.float().tanh()
        with low(enabled=False):
            y = y.exp()
        return m.head(y).float()


def off_on_another_device(m, x):
    """As code that was written for a GPU does."""
    with low():
        y = m.first(x)
        with torch.autocast("cuda", enabled=False):
            y = m.second(y)
        return m.head(y).float()


@low()
def decorated_features(m, x):
    return m.second(m.first(x))


@low()
def decorated(m, x):
    return m.head(decorated_features(m, x)).float()


def fixed_inside(m, x):
    """Stops gradients in a block, and goes on."""
    with low():
        y = m.first(x)
        with torch.no_grad():
            fixed = m.second(x) + y
        return m.head(y * fixed).float()


def fixed_at_the_end(m, x):
    with low():
        y = m.first(x)
        with torch.no_grad():
            fixed = m.second(x)
    return m.head((y * fixed).to(x.dtype))


def learned_inside_fixed(m, x):
    with low():
        y = m.first(x)
        with torch.no_grad():
            fixed = m.second(x)
            with torch.enable_grad():
                y = m.second(y)
            fixed = fixed + m.second(x)
        return m.head(y * fixed).float()


def fixed_inside_off(m, x):
    with low():
        y = m.first(x)
        with low(enabled=False):
            y = y.to(x.dtype)
            with torch.no_grad():
                fixed = m.second(x).exp()
            y = m.second(y)
        return m.head(y * fixed).float()


def one_after_the_other_fixed(m, x):
    with torch.no_grad():
        with low():
            fixed = m.first(x)
        with low():
            fixed = m.second(fixed)
    with low():
        return m.head(x * fixed).float()


def shared_layer(m, x):
    """A layer taken three times, of which autocast keeps one cast, and a weight that is read past autocast."""
    with low():
        y = m.first(m.first(x))
        with low():
            y = m.first(y)
        with low(enabled=False):
            y = y.float() @ m.first.weight
        y = y * m.first.weight.to(torch.bfloat16).sum() + m.first.weight.sum()
    return m.head(y)


def angles(x):
    with torch.autocast(device_type="cpu", enabled=False):
        found = torch.arange(4.0) * x.float()
        return found.cos().to(x.dtype), found.sin().to(x.dtype)


def rotary_layers(m, x, angles=angles):
    """As every layer of Llama makes its angles."""
    for layer in (m.first, m.second):
        (cos, sin), (again, _) = angles(x), angles(x)
        x = layer(x) * cos + x.flip(-1) * sin * again
    return m.head(x)


def rotary_layers_fixed(m, x):
    return rotary_layers(m, x, torch.no_grad()(angles))


def rotary_layers_low(m, x):
    with low():
        return rotary_layers_fixed(m, x).float()


class ParametrizedSpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))

    def forward(self, x):
        return self.linear(x)


def after_rounds(make_model, executor, precision):
    tasks = make_tasks(make_model, data=features(32), order="blocks", precision=precision)
    run_rounds(tasks, executor, 4, 0.3)
    return tasks.bank


@pytest.mark.parametrize("executor", ["threads", "fused", "fused_threads"])
@pytest.mark.parametrize("network", [SpectralNorm, Nested, Rotary, ParametrizedSpectralNorm])
def test_blocks_without_a_gradient_have_none_in_every_executor(network, executor):
    serial, other = (after_rounds(network, each, FP64) for each in ("serial", executor))
    assert_learners_equal(other, serial)


def test_autocast_in_forward_casts_as_in_serial_rounds():
    serial, fused = (after_rounds(Autocast, executor, FP32) for executor in ("serial", "fused"))
    assert_learners_equal(fused, serial, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda precision: precision.name)
@pytest.mark.parametrize(
    "take",
    [
        one_after_the_other, off_on_another_device, decorated, fixed_inside, learned_inside_fixed,
        one_after_the_other_fixed, rotary_layers, rotary_layers_fixed, rotary_layers_low,
    ],
)  # fmt: skip
def test_autocast_blocks_beside_and_in_others_learn_as_in_serial_rounds(take, precision):
    serial, fused = (after_rounds(partial(Layers, take), executor, precision) for executor in ("serial", "fused"))
    assert_learners_equal(fused, serial, 1e-6)


@pytest.mark.parametrize("take", [of_two_formats, off_twice, fixed_at_the_end, fixed_inside_off, shared_layer])
def test_autocast_blocks_that_return_their_format_learn_as_in_serial_rounds(take):
    serial, fused = (after_rounds(partial(Layers, take), executor, FP32) for executor in ("serial", "fused"))
    assert_learners_equal(fused, serial, 1e-6)


def test_gradient_stopped_in_autocast_is_that_of_plain_pytorch():
    tasks = make_tasks(partial(Layers, fixed_inside), num_learners=1, order="blocks", precision=FP32)
    inputs, template = tasks.feed.batch(0).inputs, tasks.bank.template
    graph = FusedGraph(template, inputs, tasks.bank)
    graph.run(inputs.unsqueeze(0), shared=False).square().sum().backward()
    plain = Layers(fixed_inside)
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
