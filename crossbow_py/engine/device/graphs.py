"""The interface to a CUDA device for `streams` and `fused`: streams, events, and graphs captured once and replayed.

Executors use nothing else, so that on a machine without a GPU a device that only records calls
(`tests/recording_streams.py`) proves the order of launches, records and waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.host_randomness import host_state
from crossbow_py.engine.executors.spans import Mark

# Opaque to the executor: those of tests are other objects.
Stream = Any
Event = Any
Graph = Any
Pool = Any

Body = Callable[[], None]

_HIGH_PRIORITY = -1  # lower numbers go first; learners have 0
# The first capture that could not be begun or ended in this process. torch's allocator may believe for good that it is
# under way (pytorch 180395, 190308), so no other may begin.
_FAILED_CAPTURES: list[str] = []
# Streams that were given back, by device and whether they have high priority. cuBLAS keeps a workspace for every stream
# it has worked on, 32 MiB on an H100, as long as the process lives; so new ones are made only if there is none.
_IDLE: dict[tuple[torch.device, bool], list[Stream]] = {}
_CALLS, _REPLAYS = 8, 3  # calls in a graph that is timed, and replays of it


def failed_capture() -> str | None:
    """Return why nothing is captured in this process any more, as half a sentence; None while captures may begin."""
    return f"a capture failed in this process ({_FAILED_CAPTURES[0]})" if _FAILED_CAPTURES else None


class CudaStreams:
    """The interface, for torch.cuda.

    Used from one thread; no method blocks the host unless its docstring says so. Raises UserError for a device that is
    not CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UserError(f"executor=streams runs on CUDA only, and device is {device.type}; set executor=auto.")
        self._device = device

    def new_stream(self, high_priority: bool = False) -> Stream:
        """Return a stream that runs its work in order, beside every other stream, until `give_back` takes it.

        torch has 32 streams of a priority: the 33rd in use at once is the first again.
        """
        with contextlib.suppress(IndexError):
            return _IDLE.setdefault((self._device, high_priority), []).pop()
        return torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY if high_priority else 0)  # type: ignore[no-untyped-call]

    def give_back(self, stream: Stream, high_priority: bool = False) -> None:
        """Let `new_stream` return a stream again: its work is over, and no graph that was captured on it is left."""
        _IDLE[self._device, high_priority].append(stream)

    def callers_stream(self) -> Stream:
        """Return the caller's current stream."""
        return torch.cuda.current_stream(self._device)

    def new_event(self, for_graphs: bool = False) -> Event:
        """Return an event, which may be recorded any number of times; without timing, which would make these slower.

        A graph may wait for one that is `for_graphs`, though it was not recorded in it: see `WaitBetween`.
        """
        event = torch.cuda.Event(external=for_graphs)  # type: ignore[no-untyped-call]
        if for_graphs:  # CUDA makes it at its first record; until then torch skips waits for it, also in a capture
            event.record(self.callers_stream())
        return event

    def record(self, event: Event, stream: Stream) -> None:
        """Record the end of all work on the stream so far."""
        event.record(stream)

    def timed_mark(self, stream: Stream) -> Mark:
        """Record the end of all work on the stream so far with its time; for traces and waits for other ranks."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Have later work on the stream wait for the event as it is recorded now; a later record changes nothing."""
        stream.wait_event(event)

    def new_pool(self) -> Pool:
        """Return a memory pool for graphs that never run at the same time."""
        return torch.cuda.graph_pool_handle()

    def run(self, name: str, body: Body, stream: Stream) -> None:
        """Call `body`, which enqueues its work on `stream`; `name` labels it in traces."""
        with torch.cuda.stream(stream), _RecordFunctionFast(name):
            body()

    def capture(self, name: str, body: Body, stream: Stream, pool: Pool) -> Graph:
        """Call `body` once and return its work as a graph, without running it. A process captures one graph at a time.

        It must be captured on the stream it will be replayed on: cuBLAS has a workspace for each stream, and two graphs
        captured on one stream would write to the same one while running side by side.

        Blocks the host until the device is idle. Raises the exception of `body` or of the capture. If `body` raised
        and the capture ended all the same, others may follow; else nothing may be captured in this process any more,
        see `failed_capture`. A call that CUDA refuses, such as one that waits, also makes the end of its capture fail.
        """
        assert failed_capture() is None, "torch's allocator may not be able to begin another capture"
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
            if error not in raised:  # the end failed, or the beginning
                _FAILED_CAPTURES.append(one_line(failure)[:160])
        if failure is not None:
            with contextlib.suppress(Exception):
                graph.reset()  # frees its pool at once, although tracebacks may keep the graph itself
            raise failure
        return graph

    def replay(self, graph: Graph, stream: Stream) -> None:
        """Enqueue a graph's work on the stream. Releases the interpreter lock while launching."""
        with torch.cuda.stream(stream):
            graph.replay()

    def release(self, graph: Graph) -> None:
        """Forget a graph that is not running; its pool's memory is freed with its last graph."""
        graph.reset()

    def is_over(self, event: Event) -> bool:
        """Return whether the device has passed the event. Raises errors of the device."""
        return bool(event.query())

    def synchronize_event(self, event: Event) -> None:
        """Block the host until the device has passed the event."""
        event.synchronize()  # host–device synchronisation

    def synchronize(self) -> None:
        """Block the host until the device is idle."""
        torch.cuda.synchronize(self._device)  # host–device synchronisation

    def host_values(self, *shape: int) -> Tensor:
        """Return float64 zeros in pinned memory, to which the device can copy without blocking the host."""
        return torch.zeros(shape, dtype=torch.float64, pin_memory=True)

    def random_state(self) -> Hashable:
        """Return the state of every global generator that a model may draw from, which changes with every draw.

        A graph would repeat numbers drawn on the host, and graphs that draw on the device must not run side by side.
        """
        own = torch.get_rng_state(), self._device_random_state()
        return host_state(), *(state.numpy().tobytes() for state in own)

    def _device_random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device)  # seed and offset are kept on the host, so nothing waits


@dataclass(frozen=True)
class WaitBetween:
    """Two bodies on a stream, the second after an event. As a graph, each replay waits for the last record before it.

    The graph has an external event wait node; the event must be `for_graphs`, or None for no wait.
    """

    device: CudaStreams
    stream: Stream
    first: Body
    event: Event | None
    second: Body

    def __call__(self) -> None:
        """Enqueue the work and, between, the wait."""
        self.first()
        if self.event is not None:
            self.device.wait(self.stream, self.event)
        self.second()


def graph_milliseconds(device: torch.device) -> Callable[[Callable[[], Tensor]], float]:
    """Return a function that times work as in a CUDA graph: the best of a few replays of a graph of a few calls.

    Outside a graph, the time of small operators is only how fast the host launches them. It is captured and replayed
    on a stream that nothing else uses, as a capture holds whatever any thread enqueues on its stream.
    """
    streams = CudaStreams(device)

    def milliseconds(run: Callable[[], Tensor]) -> float:
        if failed := failed_capture():
            raise RuntimeError(failed)
        stream = streams.new_stream()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # libraries choose algorithms and allocate workspaces at their first call on a stream

        def calls() -> None:
            for _ in range(_CALLS):
                run()

        try:
            graph = streams.capture("what is timed", calls, stream, None)
        except Exception:
            if failed_capture() is None:
                streams.give_back(stream)
            raise
        try:
            times = []
            for _ in range(_REPLAYS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record(stream)
                streams.replay(graph, stream)
                end.record(stream)
                end.synchronize()  # host–device synchronisation
                times.append(float(begin.elapsed_time(end)))
        finally:
            streams.release(graph)
        streams.give_back(stream)
        return min(times) / _CALLS

    return milliseconds
