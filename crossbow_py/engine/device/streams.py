"""What `streams` and `fused` ask of a device: streams, events, and graphs that are captured once and replayed.

The executor knows no other way to the device, so that a device that only writes down what it is asked for proves the
order of launches, records and waits on a machine without a GPU (`tests/recording_streams.py`).
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

# Opaque to the executor: whatever the device made.
Stream = Any
Event = Any
Graph = Any
Pool = Any

Body = Callable[[], None]

_HIGH_PRIORITY = -1  # lower numbers go first; learners have 0


class DeviceStreams(ABC):
    """The narrow interface. Used from one thread; nothing blocks the host unless it says so."""

    @abstractmethod
    def new_stream(self, high_priority: bool = False) -> Stream:
        """A stream that runs its work in order, beside every other stream."""

    @abstractmethod
    def callers_stream(self) -> Stream:
        """The stream the caller's own work is on, now."""

    @abstractmethod
    def new_event(self) -> Event:
        """A marker; it may be recorded again and again."""

    @abstractmethod
    def record(self, event: Event, stream: Stream) -> None:
        """Mark the end of all that is on the stream so far."""

    @abstractmethod
    def timed_mark(self, stream: Stream) -> Mark:
        """The end of all that is on the stream so far, as a moment that can be told; for traces alone."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Work put on the stream from now on starts after what the event marks now."""

    @abstractmethod
    def new_pool(self) -> Pool:
        """Memory for graphs that never run at the same time."""

    @abstractmethod
    def run(self, name: str, body: Body, stream: Stream) -> None:
        """Call `body` now, its work going to `stream`; `name` labels it in traces."""

    @abstractmethod
    def capture(self, name: str, body: Body, stream: Stream, pool: Pool) -> Graph:
        """Call `body` once and keep its work as a graph; nothing of it is done. One capture at a time a process.

        Blocks the host until the device is idle. Raises what `body` raised, or what ended the capture; a process
        that has seen this happen should not go on with CUDA.
        """

    @abstractmethod
    def replay(self, graph: Graph, stream: Stream) -> None:
        """Put a graph's work on the stream."""

    @abstractmethod
    def release(self, graph: Graph) -> None:
        """Forget a graph that is not running."""

    @abstractmethod
    def is_over(self, event: Event) -> bool:
        """Whether what the event marks is over. Raises what only the device saw."""

    @abstractmethod
    def synchronize_event(self, event: Event) -> None:
        """Block the host until what the event marks is over."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device is idle."""

    @abstractmethod
    def host_values(self, *shape: int) -> Tensor:
        """Zeros, float64, where the device can copy to without the host waiting."""

    def random_state(self) -> Hashable:
        """The state of every generator a model may draw from unasked: it is another one after a draw.

        A graph would repeat what was drawn on the host, and graphs that draw on the device must not run side by side.
        """
        own = torch.get_rng_state(), self._device_random_state()
        return host_state(), *(state.numpy().tobytes() for state in own)

    @abstractmethod
    def _device_random_state(self) -> Tensor:
        """The state of torch's own generator for the device, uint8 on the host."""


class CudaStreams(DeviceStreams):
    """The interface over torch.cuda. Not one line of it has run on a GPU yet.

    Raises UserError for a device that is not CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UserError(f"executor=streams runs on CUDA only, and device is {device.type}; set executor=auto.")
        self._device = device

    def new_stream(self, high_priority: bool = False) -> torch.cuda.Stream:
        """See DeviceStreams. torch deals out 32 streams of a priority in turn: the 33rd is the first again."""
        return torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY if high_priority else 0)  # type: ignore[no-untyped-call]

    def callers_stream(self) -> torch.cuda.Stream:
        """See DeviceStreams."""
        return torch.cuda.current_stream(self._device)

    def new_event(self) -> torch.cuda.Event:
        """See DeviceStreams; without timing, which would make records slower."""
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

        Captured on the stream it will be replayed on: cuBLAS keeps a workspace a stream, and two graphs captured on
        one stream would write to the same while running side by side.
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
            # Entering the graph synchronises with the host. The guard around it: when ending a capture fails, torch
            # leaves the capture's stream as the current one.
            with (
                torch.cuda.stream(stream),
                _RecordFunctionFast(f"capture {name}"),
                torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            ):
                watched()
        except Exception as error:
            # What the body raised says more than the end of the capture, which fails because of it.
            failure = raised[0] if raised else error
        if failure is not None:
            with contextlib.suppress(Exception):
                graph.reset()  # gives its pool back at once, while tracebacks may keep the graph itself
            raise failure
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """See DeviceStreams. Releases the interpreter lock while launching."""
        with torch.cuda.stream(stream):
            graph.replay()

    def release(self, graph: torch.cuda.CUDAGraph) -> None:
        """See DeviceStreams; the pool gives its memory back with its last graph."""
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
