"""What answers batches: operators as they were recorded, CUDA graphs, and the fastest."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from crossbow_py.core.measured import fastest
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.executors.on_device import CaptureError
from crossbow_py.engine.fusion.graph import FusedGraph
from crossbow_py.engine.modules.precision import FP32
from crossbow_py.engine.native import dense
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


class LastOutput(nn.GRU):
    """A layer's output of the last step."""

    def __init__(self):
        super().__init__(3, 4, batch_first=True)

    def forward(self, x):
        return super().forward(x)[0][:, -1]


def fused(make, inputs):
    bank = ReplicaBank(
        make(), 3, device=CPU, precision=FP32, state_names=(), order="blocks", training=False, shares_base=False
    )
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


@pytest.mark.skipif(not dense.serves(torch.zeros(1)), reason="there is no C compiler")
def test_what_calls_c_code_is_not_recorded():
    """A recording would hold the memory that C code writes, and not the call."""
    inputs = torch.randn(2, 5, 3)
    run = fused(LastOutput, inputs)
    assert recorded(run, inputs) is run


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


def test_function_is_warmed_up_then_captured_and_every_call_waits_for_the_last_of_any_graph():
    device = Device()
    captures = made(device)
    double, triple = (captures.captured(lambda x, n=n: n * x, torch.ones(2)) for n in (2, 3))
    assert [entry for entry in device.log if not entry.startswith("caller")][:6] == [
        "s0 wait caller#1", "s0 wait None", "s0 run the models", "s0 run the models", "host wait all",
        "s0 capture the models in 1",
    ]  # fmt: skip
    device.log.clear()
    for run, factor in ((double, 2), (triple, 3), (double, 2)):
        batch = torch.randn(2)
        first = run(batch)
        assert torch.equal(first, factor * batch)
        run(batch + 1)
        assert torch.equal(first, factor * batch)  # the caller's own
    assert device.log[:6] == [
        "caller wait None", "caller replay the models in 1", "caller record caller#3",
        "caller wait caller#3", "caller replay the models in 1", "caller record caller#4",
    ]  # fmt: skip
    assert device.log[6] == "caller wait caller#4"  # the other graph, for the same event


def test_graphs_share_a_pool_which_is_another_one_when_the_last_has_gone():
    device = Device()
    captures = made(device)
    runs = [captures.captured(lambda x: x + 1, torch.ones(size)) for size in (1, 2)]
    for run in runs:
        captures.release(run)
    captures.captured(lambda x: x + 1, torch.ones(3))
    assert [entry for entry in device.log if "capture" in entry] == [
        f"s0 capture the models in {pool}" for pool in (1, 1, 2)
    ]
    gone = device.log.index("release the models in 1")
    assert device.log[gone - 1].startswith("host wait")  # until it has run


def test_function_that_draws_is_no_graph_and_keeps_its_place_in_the_order():
    device = Device()
    captures = made(device)
    run = captures.captured(lambda x: x + torch.rand(()), torch.ones(1))
    assert captures.notes == ["CUDA graphs are not used: the models draw random numbers."]
    assert not any("capture" in entry for entry in device.log)
    device.log.clear()
    assert run(torch.ones(1)) != run(torch.ones(1))
    assert device.log == [
        "caller wait None",
        "caller record caller#2",
        "caller wait caller#2",
        "caller record caller#3",
    ]
    captures.release(run)


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


def test_fastest_takes_the_least_median_and_leaves_the_first_call_out():
    now, costs = [0.0], {"a": itertools.chain([0.1], itertools.repeat(2.0)), "b": itertools.repeat(1.0)}
    costs["c"] = itertools.chain([0.0], itertools.cycle([0.1, 3.0, 3.0]))

    def run(name):
        now[0] += next(costs[name])

    assert fastest({name: lambda name=name: run(name) for name in costs}, clock=lambda: now[0]) == "b"


def test_where_nothing_is_captured_calls_run_as_they_are_and_in_order(monkeypatch):
    monkeypatch.setenv("CROSSBOW_GRAPHS", "0")
    device = Device()
    captures = made(device)
    run, _ = (captures.captured(lambda x: 3 * x, torch.ones(size)) for size in (2, 4))
    assert run(torch.ones(2)).tolist() == [3.0, 3.0]
    assert captures.notes == ["CUDA graphs are not used: CROSSBOW_GRAPHS is 0."]
    assert not any("capture" in entry for entry in device.log)
