"""The times at which tasks ran, for the timeline: by the host's clock on CPU, by events on the stream on CUDA.

On CUDA the host is far ahead of the device, so its clock says only when a task was enqueued. There a task lies between
two events, whose times are read once the device has passed them; the host does not wait for this while rounds go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from crossbow_py.telemetry.timeline import Timeline

_NS_PER_MS = 1_000_000
# Events give times as float32 milliseconds: to 0.06 µs over a second, but to 0.06 ms over a quarter of an hour.
_FARTHEST_MS = 1000.0


class Mark(Protocol):
    """A moment on a stream: the interface of a recorded `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def synchronize(self) -> None:
        """Block the host until the device has passed it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds to `end`; the device must have passed both."""


class TaskSpans(ABC):
    """Measures blocks of work and adds them to a timeline."""

    @abstractmethod
    def span(self, name: str, row: str, round_index: int) -> AbstractContextManager[None]:
        """Measure the block as `name` of round `round_index`, shown on `row`."""

    @abstractmethod
    def resolve(self) -> None:
        """Wait for the blocks so far, so that the timeline has all of them."""


class HostSpans(TaskSpans):
    """Measures tasks that are over when their call returns, on any number of threads."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def span(self, name: str, row: str, round_index: int) -> AbstractContextManager[None]:
        """See TaskSpans; a block that raises is kept as well."""
        return self._timeline.span(name, row, round=round_index)

    def resolve(self) -> None:
        """See TaskSpans; there is nothing to wait for."""


class _Block(NamedTuple):
    name: str
    row: str
    round_index: int
    start: Mark
    end: Mark


class Moment(NamedTuple):
    """One moment on the device's clock and on the timeline's."""

    mark: Mark
    time_ns: int


def this_moment(timeline: Timeline, mark: Callable[[], Mark]) -> Moment:
    """Return the current moment. Blocks the host until the stream is idle."""
    mark().synchronize()  # host–device synchronisation: the stream must be idle before the moment
    before_ns, origin = timeline.clock(), mark()
    origin.synchronize()  # host–device synchronisation
    return Moment(origin, (before_ns + timeline.clock()) // 2)


class StreamSpans(TaskSpans):
    """Measures tasks enqueued on one stream. Used from one thread. It has not run on a GPU yet.

    A time is that of a moment known on both clocks, plus what has passed on the device's clock since: if the two clocks
    drift apart, spans follow the device.

    Args:
        timeline: gets the spans.
        mark: records an event on the stream, without blocking the host.
        moment: a moment on both clocks; by default the current one, for which the host waits until the stream is idle.
    """

    def __init__(self, timeline: Timeline, mark: Callable[[], Mark], moment: Moment | None = None) -> None:
        self._timeline, self._mark = timeline, mark
        self._blocks: deque[_Block] = deque()
        self._origin, self._origin_ns = moment or this_moment(timeline, mark)

    @contextmanager
    def span(self, name: str, row: str, round_index: int) -> Iterator[None]:
        """See TaskSpans. Records an event on either side; the host does not block. A block that raises is left out."""
        start = self._mark()
        yield
        self._blocks.append(_Block(name, row, round_index, start, self._mark()))
        # Blocks that the device has passed are read now, so that events do not pile up in long epochs.
        while self._blocks and self._blocks[0].end.query():
            self._read(self._blocks.popleft())

    def resolve(self) -> None:
        """See TaskSpans."""
        if self._blocks:
            self._blocks[-1].end.synchronize()  # host–device synchronisation
        while self._blocks:
            self._read(self._blocks.popleft())

    def _read(self, block: _Block) -> None:
        start_ns = self._time_ns(block.start)
        if start_ns - self._origin_ns >= _FARTHEST_MS * _NS_PER_MS:
            self._origin, self._origin_ns = block.start, start_ns
        self._timeline.add(block.name, block.row, start_ns, self._time_ns(block.end), {"round": block.round_index})

    def _time_ns(self, mark: Mark) -> int:
        return self._origin_ns + round(self._origin.elapsed_time(mark) * _NS_PER_MS)


class SpansOfStreams(TaskSpans):
    """Measures tasks on several streams of a device, with `StreamSpans` for each from one common moment.

    Making one blocks the host until the first stream is idle.

    Args:
        timeline: gets the spans.
        marks: for every row, a function that records an event on its stream, without blocking the host.
    """

    def __init__(self, timeline: Timeline, marks: Mapping[str, Callable[[], Mark]]) -> None:
        moment = this_moment(timeline, next(iter(marks.values())))
        self._spans = {row: StreamSpans(timeline, mark, moment) for row, mark in marks.items()}

    def span(self, name: str, row: str, round_index: int) -> AbstractContextManager[None]:
        """See TaskSpans and `StreamSpans.span`."""
        return self._spans[row].span(name, row, round_index)

    def resolve(self) -> None:
        """See TaskSpans."""
        for spans in self._spans.values():
            spans.resolve()


def spans_on(device: torch.device, timeline: Timeline) -> TaskSpans:
    """Return the spans of tasks on a device; on CUDA, of those on its current stream."""
    if device.type != "cuda":
        return HostSpans(timeline)

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return StreamSpans(timeline, mark)
