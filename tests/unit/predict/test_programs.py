"""What answers batches: operators as they were recorded, CUDA graphs, and the fastest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors.on_device import CaptureError
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.predict.programs import CapturedRun, Captures, recorded
from tests import networks
from tests.recording_streams import RecordingStreams
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
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


class Device(RecordingStreams):
    """Numbers its pools, and refuses to capture what it is told to."""

    def __init__(self):
        super().__init__()
        self.pools, self.error = 0, None

    def new_pool(self):
        self.pools += 1
        return self.pools

    def capture(self, name, body, stream, pool):
        if self.error is not None:
            raise self.error
        graph = super().capture(f"{name} in {pool}", body, stream, pool)
        body()  # as a capture does
        return graph


def made(device):
    return Captures("streams", [], device)


def test_what_no_graph_can_hold_is_the_users_to_know_and_want_of_memory_is_not():
    device = Device()
    captures = made(device)
    device.error = RuntimeError("operation not permitted when stream is capturing")
    refusal = (
        r"executor=streams cannot capture the models as a CUDA graph \(RuntimeError: operation .*; set executor=serial"
    )
    with pytest.raises(CaptureError, match=refusal):
        captures.captured(lambda x: x, torch.ones(1))
    device.error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        captures.captured(lambda x: x, torch.ones(1))
    device.error = None
    assert isinstance(captures.captured(lambda x: x, torch.ones(1)), CapturedRun)
