"""Recorded runs: the same answers by fewer calls, and functions that cannot be recorded left as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.predict.recording import recorded
from tests import networks
from tests.support import CPU


class Counting(TorchDispatchMode):
    """The operators called, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def fused(make, inputs):
    bank = ReplicaBank(make(), 3, device=CPU, precision=FP32, state_names=(), order="blocks", training=False)
    for row in range(3):
        bank.load_learner(row, make())
    graph = FusedGraph(bank.template, inputs, bank, training=False)
    return lambda batch: graph.run(batch, shared=True)


@pytest.mark.parametrize("network", networks.NETWORKS)
def test_recorded_run_of_a_graph_answers_as_the_graph_does(network):
    inputs = networks.inputs_for(network, 4)[0]
    run = fused(network, inputs)
    replay = recorded(run, inputs)
    assert replay is not run
    other = inputs.flip(0).clone()
    with torch.no_grad():
        torch.testing.assert_close(replay(other), run(other))
    assert torch.equal(other, inputs.flip(0))


def test_what_hangs_on_weights_alone_is_computed_once():
    inputs = torch.randn(2, 4)
    run = fused(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), inputs)
    replay = recorded(run, inputs)
    with torch.no_grad(), Counting() as counting:
        replay(inputs)
    assert [name for name in counting.names if name not in ("view", "permute")] == ["addmm", "relu_", "baddbmm"]


def test_tensors_made_on_the_way_are_made_once_too():
    scale, inputs = torch.randn(3), torch.randn(2, 3)
    replay = recorded(lambda inputs: inputs * scale.exp().add(1).sqrt(), inputs)
    with Counting() as counting:
        replay(inputs)
    assert counting.names == ["mul"]


def test_function_that_draws_is_left_as_it_is():
    def draw(inputs):
        return inputs + torch.rand(3)

    assert recorded(draw, torch.randn(3)) is draw


def test_function_that_looks_at_values_is_left_as_it_is():
    def decide(inputs):
        return inputs if inputs.sum().item() > 0 else -inputs

    assert recorded(decide, torch.randn(3)) is decide


def test_function_whose_recording_gives_other_numbers_is_left_as_it_is():
    calls = []

    def differ(inputs):
        calls.append(1)
        return inputs + len(calls)

    assert recorded(differ, torch.ones(3)) is differ
