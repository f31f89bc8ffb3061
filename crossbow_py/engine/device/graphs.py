"""The interface to a device for `streams` and `fused`: streams, events, and graphs captured once and replayed.

Executors use nothing else, so that on a machine without a GPU a device that only records calls
(`tests/recording_streams.py`) proves the order of launches, records and waits.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from crossbow_py.core.errors import UserError
from crossbow_py.core.host_randomness import host_state
from crossbow_py.engine.executors.spans import Mark

# Opaque to the executor: each device has its own.
Stream = Any
Event = Any
Graph = Any
Pool = Any

Body = Callable[[], None]

_HIGH_PRIORITY = -1  # lower numbers go first; learners have 0


class DeviceStreams(ABC):
    """The interface. Used from one thread; no method blocks the host unless its docstring says so."""

    @abstractmethod
    def new_stream(self, high_priority: bool = False) -> Stream:
        """Return a stream that runs its work in order, beside every other stream."""

    @abstractmethod
    def callers_stream(self) -> Stream:
        """Return the caller's current stream."""

    @abstractmethod
    def new_event(self) -> Event:
        """Return an event, which may be recorded any number of times."""

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """Record the end of all work on the stream so far."""

    @abstractmethod
    def timed_mark(self, stream: Stream) -> Mark:
        """Record the end of all work on the stream so far with its time; only for traces."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Have later work on the stream wait for the event as it is recorded now."""

    @abstractmethod
    def new_pool(self) -> Pool:
        """Return a memory pool for graphs that never run at the same time."""

    @abstractmethod
    def run(self, name: str, body: Body, stream: Stream) -> None:
        """Call `body`, which enqueues its work on `stream`; `name` labels it in traces."""

    @abstractmethod
    def capture(self, name: str, body: Body, stream: Stream, pool: Pool) -> Graph:
        """Call `body` once and return its work as a graph, without running it. A process captures one graph at a time.

        Blocks the host until the device is idle. Raises the exception of `body` or of the capture; after one of the
        latter the process should not go on with CUDA.
        """

    @abstractmethod
    def replay(self, graph: Graph, stream: Stream) -> None:
        """Enqueue a graph's work on the stream."""

    @abstractmethod
    def release(self, graph: Graph) -> None:
        """Forget a graph that is not running."""

    @abstractmethod
    def is_over(self, event: Event) -> bool:
        """Return whether the device has passed the event. Raises errors of the device."""

    @abstractmethod
    def synchronize_event(self, event: Event) -> None:
        """Block the host until the device has passed the event."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device is idle."""

    @abstractmethod
    def host_values(self, *shape: int) -> Tensor:
        """Return float64 zeros on the host to which the device can copy without blocking the host."""

    def random_state(self) -> Hashable:
        """Return the state of every global generator that a model may draw from, which changes with every draw.

        A graph would repeat numbers drawn on the host, and graphs that draw on the device must not run side by side.
        """
        own = torch.get_rng_state(), self._device_random_state()
        return host_state(), *(state.numpy().tobytes() for state in own)

    @abstractmethod
    def _device_random_state(self) -> Tensor:
        """Return the state of torch's own generator of the device, uint8 on the host."""


class CudaStreams(DeviceStreams):
    """The interface to torch.cuda. It has not run on a GPU yet.

    Raises UserError for a device that is not CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UserError(f"executor=streams runs on CUDA only, and device is {device.type}; set executor=auto.")
        self._device = device

    def new_stream(self, high_priority: bool = False) -> torch.cuda.Stream:
        """See DeviceStreams. torch has 32 streams of a priority: the 33rd is the first again."""
        return torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY if high_priority else 0)  # type: ignore[no-untyped-call]

    def callers_stream(self) -> torch.cuda.Stream:
        """See DeviceStreams."""
        return torch.cuda.current_stream(self._device)

    def new_event(self) -> torch.cuda.Event:
        """See DeviceStreams. The event has no timing, which would make records slower."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See DeviceStreams."""
        event.record(stream)

    def timed_mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See DeviceStreams."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See DeviceStreams. A later record of the event does not move what the stream waits for."""
        stream.wait_event(event)

    def new_pool(self) -> Pool:
        """See DeviceStreams."""
        return torch.cuda.graph_pool_handle()

    def run(self, name: str, body: Body, stream: torch.cuda.Stream) -> None:
        """See DeviceStreams."""
        with torch.cuda.stream(stream), _RecordFunctionFast(name):
            body()

    def capture(self, name: str, body: Body, stream: torch.cuda.Stream, pool: Pool) -> torch.cuda.CUDAGraph:
        """See DeviceStreams.

        The graph must be captured on the stream it will be replayed on: cuBLAS has a workspace for each stream, and two
        graphs captured on one stream would write to the same one while running side by side.
        """
        graph = torch.cuda.CUDAGraph()
        raised: list[Exception] = []

        def watched() -> None:
            try:
                body()
            except Exception as error:
                raised.append(error)
                raise

        failure: Exception | None = None
        try:
            # Entering the graph is a host–device synchronisation. The outer guard restores the current stream, which
            # torch does not if ending a capture fails.
            with (
                torch.cuda.stream(stream),
                _RecordFunctionFast(f"capture {name}"),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                watched()
        except Exception as error:
            # The body's exception says more than that of the capture, which fails because of it.
            failure = raised[0] if raised else error
        if failure is not None:
            with contextlib.suppress(Exception):
                graph.reset()  # frees its pool at once, although tracebacks may keep the graph itself
            raise failure
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """See DeviceStreams. Releases the interpreter lock while launching."""
        with torch.cuda.stream(stream):
            graph.replay()

    def release(self, graph: torch.cuda.CUDAGraph) -> None:
        """See DeviceStreams; the pool's memory is freed with its last graph."""
        graph.reset()

    def is_over(self, event: torch.cuda.Event) -> bool:
        """See DeviceStreams."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize_event(self, event: torch.cuda.Event) -> None:
        """See DeviceStreams."""
        event.synchronize()  # host–device synchronisation

    def synchronize(self) -> None:
        """See DeviceStreams."""
        torch.cuda.synchronize(self._device)  # host–device synchronisation

    def host_values(self, *shape: int) -> Tensor:
        """See DeviceStreams: pinned memory."""
        return torch.zeros(shape, dtype=torch.float64, pin_memory=True)

    def _device_random_state(self) -> Tensor:
        """See DeviceStreams. Seed and offset are kept on the host, so nothing waits."""
        return torch.cuda.get_rng_state(self._device)
