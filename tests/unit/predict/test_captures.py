"""Functions as graphs, on a device that writes down what it is asked for: order, pools, and what is no graph."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.engine.executors.on_device import CaptureError
from crossbow_py.predict.captures import CapturedRun, Captures, OrderedRun
from tests.recording_streams import RecordingStreams


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
    assert isinstance(run, OrderedRun) and not any("capture" in entry for entry in device.log)
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
