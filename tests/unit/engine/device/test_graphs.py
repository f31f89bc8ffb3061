"""Streams of the process: made as few as are in use at once, so that libraries' workspaces do not add up."""

from __future__ import annotations

import contextlib

import pytest
import torch

from crossbow_py.engine.device import graphs
from crossbow_py.engine.device.graphs import CudaStreams
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.predict.programs import Captures
from tests.recording_streams import RecordingStreams
from tests.support import make_tasks, plan, run

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The priorities of the streams that were made, which are no streams."""
    priorities = []

    class FakeStream:
        def __init__(self, device, priority=0):
            priorities.append(priority)

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(graphs, "_IDLE", {})
    return priorities


class OnePool(RecordingStreams):
    """Takes streams from the pool of the process, and logs nothing that names them."""

    new_stream, give_back, _device = CudaStreams.new_stream, CudaStreams.give_back, CUDA


def test_stream_that_was_given_back_is_the_next_one_of_its_device_and_priority(made):
    streams, other = CudaStreams(CUDA), CudaStreams(torch.device("cuda", 1))
    low, high = streams.new_stream(), streams.new_stream(high_priority=True)
    assert made == [0, -1]
    streams.give_back(low)
    streams.give_back(high, high_priority=True)
    assert other.new_stream() not in (low, high)
    assert (CudaStreams(CUDA).new_stream(high_priority=True), CudaStreams(CUDA).new_stream()) == (high, low)
    assert streams.new_stream() not in (low, high)  # both are in use


@pytest.mark.parametrize(("executor", "expected"), [(FusedExecutor, [0]), (StreamsExecutor, [0, 0, -1])])
def test_executors_one_after_another_work_on_the_same_streams(executor, expected, made):
    tasks = make_tasks(order="blocks")
    for _ in range(3):
        runner = executor(tasks, OnePool())
        runner.submit(plan(tasks, 0))
        runner.drain()
        runner.close()
        runner.close()  # gives none back twice
    assert made == expected
    both = [executor(tasks, OnePool()) for _ in range(2)]
    assert made == expected * 2
    for runner in both:
        runner.close()


def test_first_round_that_is_repeated_by_operators_needs_no_streams_of_its_own(made):
    tasks = make_tasks(order="blocks")
    runner, learn = FusedExecutor(tasks, OnePool(), kernels=False), tasks.loss

    def fails_once(*arguments):
        tasks.loss = learn
        raise RuntimeError("out of resource")

    tasks.loss, runner._on_trial = fails_once, True
    run(runner, tasks, 2)
    assert "Kernels are not used" in runner.notes[0]
    assert made == [0]


class Timed:
    """An event, or a graph: does nothing, at once."""

    def __init__(self, **options):
        self.options = options

    def elapsed_time(self, end):
        return 16.0

    def record(self, stream): ...

    def synchronize(self): ...

    def replay(self): ...

    def reset(self): ...


@contextlib.contextmanager
def never_ends(graph, **options):
    """A capture that is as the body left it."""
    try:
        yield
    except RuntimeError:
        raise RuntimeError("capture was invalidated")  # noqa: B904 - as torch does


@pytest.fixture
def timed(monkeypatch):
    """What times work on a stand-in for torch.cuda."""
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "caller")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())
    for name in ("Event", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Timed)
    monkeypatch.setattr(graphs, "_FAILED_CAPTURES", [])
    return graphs.graph_milliseconds(CUDA)


class Work:
    """Fails in its second call, which is the first that is captured."""

    calls = 0

    def __call__(self):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)


def test_work_is_timed_on_one_stream_until_a_capture_has_failed(made, timed, monkeypatch):
    assert [timed(lambda: torch.ones(1)) for _ in range(2)] == [2.0, 2.0]  # 16 ms for eight calls
    assert made == [0]
    monkeypatch.setattr(torch.cuda, "graph", never_ends)
    work = Work()
    with pytest.raises(RuntimeError, match="not permitted"):
        timed(work)
    with pytest.raises(RuntimeError, match="a capture failed in this process .*not permitted"):
        timed(work)
    assert (work.calls, made) == (2, [0])


def test_stream_of_a_capture_that_ended_with_an_error_of_its_body_times_other_work(made, timed):
    with pytest.raises(RuntimeError, match="not permitted"):
        timed(Work())
    assert timed(lambda: torch.ones(1)) == 2.0
    assert made == [0]


def test_ensembles_one_after_another_capture_on_the_same_stream(made):
    for _ in range(2):
        captures = Captures("streams", [], OnePool())
        captures.release(captures.captured(lambda x: x + 1, torch.ones(2)))
        captures.close()
        captures.close()
    assert made == [0]
