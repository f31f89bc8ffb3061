"""Layers that are frozen and the same for all learners: what a bank's graph gives, against each model alone.

What this alone catches: a rule that takes a shared weight for a learner's own, or computes with it in a loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossbow_py import frozen
from crossbow_py.averaging import Independent
from crossbow_py.engine.bank.frozen_base import note_only_read
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.fusion.rules.registry import RULES, Call
from crossbow_py.engine.fusion.values import Fused, Layout
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.precision import BF16
from tests.support import features, make_tasks, run
from tests.thinned import pairs
from tests.unit.engine.fusion.trio import K, Trio


class Turned(nn.Module):
    """GPT-2's linear layer, whose weights are `[in, out]`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 6), self.weight).view(x.shape)


class Attends(nn.Module):
    """Attention of six values in two heads, by a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.mixes = nn.Embedding(4, 6), nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unsqueeze(1) + self.positions(torch.arange(4))
        return self.mixes(steps, steps, steps, need_weights=False)[0].sum(1)


class Recurs(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1]


class Images(nn.Module):
    """A layer on images `[B, 6, 3, 3]` made of six values."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, :, None, None] * torch.linspace(0.5, 1.5, 9).view(3, 3)).mean((2, 3))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "turned": Turned,
    "layer norm": lambda: nn.LayerNorm(6),
    "rms norm": lambda: nn.RMSNorm(6),
    "still norm": lambda: nn.BatchNorm1d(6),
    "convolution": lambda: Images(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
    "groups": lambda: Images(nn.Conv2d(6, 6, 3, groups=3, bias=False), nn.GroupNorm(2, 6)),
    "transposed": lambda: Images(nn.ConvTranspose2d(6, 6, 2), nn.InstanceNorm2d(6, affine=True), nn.AvgPool2d(2)),
    "attention": Attends,
    "lstm": lambda: Recurs(nn.LSTM),
    "gru": lambda: Recurs(nn.GRU),
}
PLACES = {
    "first": lambda layer: nn.Sequential(frozen(layer), nn.Linear(6, 4)),
    "between": lambda layer: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), frozen(layer), nn.Linear(6, 4)),
    "last": lambda layer: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), frozen(layer)),
}


def trio_of(model: nn.Module) -> Trio:
    """Three models, with the same frozen values, and other values of what is trained."""
    models = [copy.deepcopy(model.double()) for _ in range(K)]
    for own in models:
        for parameter in own.parameters():
            if parameter.requires_grad:
                parameter.data.uniform_(-0.8, 0.8)
    return Trio(models)


@pytest.mark.parametrize(("kind", "place", "shared"), pairs(list(KINDS), list(PLACES), [True, False], quick=len(KINDS)))
def test_frozen_layer_of_all_learners_equals_three_modules(kind: str, place: str, shared: bool) -> None:
    torch.manual_seed(0)
    layer = KINDS[kind]()
    for name, value in layer.named_buffers():
        if value.is_floating_point():
            value.uniform_(0.5, 1.5) if name.endswith("var") else value.normal_()
    trio = trio_of(PLACES[place](layer))
    inputs = torch.randn(*(() if shared else (K,)), 5, 6, dtype=torch.float64)
    graph = trio.graph(inputs if shared else inputs[0])
    trio.check(graph, inputs, shared=shared)
    assert graph.looped == []


@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize("shared", [True, False], ids=["one batch", "own batches"])
@pytest.mark.parametrize("kind", ["linear", "turned", "layer norm", "convolution", "still norm"])
def test_layer_of_which_a_part_is_trained_equals_three_modules(kind: str, shared: bool, trained: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(frozen(KINDS[kind]()), nn.Linear(6, 4))
    for name, own in model[0].named_parameters():
        own.requires_grad_(name.endswith(trained))
    trio = trio_of(model)
    inputs = torch.randn(*(() if shared else (K,)), 5, 6, dtype=torch.float64)
    graph = trio.graph(inputs if shared else inputs[0])
    trio.check(graph, inputs, shared=shared)
    assert graph.looped == []


class Places(nn.Module):
    """A sum of rows of a frozen table, found by a buffer of indices, times a buffer of factors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = frozen(nn.Embedding(5, 6)), nn.Linear(6, 4)
        self.register_buffer("places", torch.tensor([0, 3, 1]))
        self.register_buffer("factors", torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.factors + self.table(self.places).sum(0))


def test_buffers_are_read_as_one_until_a_learner_has_other_values() -> None:
    torch.manual_seed(0)
    trio = trio_of(Places())
    inputs = torch.randn(5, 6, dtype=torch.float64)
    graph = trio.graph(inputs)
    for _ in range(2):
        trio.check(graph, inputs, shared=True)
        assert graph.shared_buffers.keys() == {"places", "factors"}
    for own in (trio.models[1], trio.bank.module(1)):
        own.places[0] = 2
    trio.check(graph, inputs, shared=True)
    assert graph.shared_buffers.keys() == {"factors"}
    with torch.no_grad():
        trio.models[2].factors.add_(1)
    trio.bank.load_learner(2, trio.models[2])
    trio.check(graph, inputs, shared=True)
    assert not graph.shared_buffers


def test_graph_that_is_wrong_only_where_buffers_differ_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_first(call: Call, args: list[Any], kwargs: Mapping[str, Any]) -> Fused:
        if all(own.layout is Layout.SHARED for own in args):
            return Fused(torch.matmul(*(own.tensor for own in args)), Layout.SHARED)
        left, right = (call.stack(own) for own in args)
        return Fused(left @ right[:1], Layout.STACK)

    class Mixed(Places):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mix", torch.rand(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = super().forward(x @ self.mix)
            return found

    monkeypatch.setitem(RULES, "matmul", of_the_first)
    model = Mixed()
    note_only_read(model)
    with pytest.raises(FusionError, match="other numbers"):
        FusedExecutor(make_tasks(lambda: model, data=features(48, (6,), 4), order="blocks", rule=Independent()))


class Positions(nn.Module):
    """A frozen table whose places are a buffer of floats: none of them can be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = frozen(nn.Embedding(6, 6)), nn.Linear(6, 4)
        self.register_buffer("places", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x + self.table(self.places.long()).sum(0))
        return found


def test_buffer_that_bears_no_other_value_is_compared_as_it_is() -> None:
    model = Positions()
    note_only_read(model)
    tasks = make_tasks(lambda: model, data=features(48, (6,), 4), order="blocks", rule=Independent())
    reference = make_tasks(lambda: model, data=features(48, (6,), 4), order="blocks", rule=Independent())
    (found,), (expected,) = run(FusedExecutor(tasks), tasks, 1), run(SerialExecutor(reference), reference, 1)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


class Scaled(nn.Module):
    """A layer times a number of its own, as LoRA's, which decides nothing about the format."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_a_learners_number_leaves_the_format_of_its_layer() -> None:
    torch.manual_seed(0)
    models = [Scaled() for _ in range(K)]
    for number, model in enumerate(models):
        model.scale.fill_(0.3 * (number + 1))
    trio = Trio(models, BF16)
    inputs = torch.randn(5, 6).bfloat16()
    graph = trio.graph(inputs)
    found = graph.run(inputs, shared=True)
    assert found.dtype is torch.bfloat16 and graph.looped == []
    for learner in range(K):
        torch.testing.assert_close(found[learner], trio.bank.module(learner)(inputs))
