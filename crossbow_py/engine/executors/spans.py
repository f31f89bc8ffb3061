"""The times at which tasks ran, for the timeline: by the host's clock on CPU, by events on the stream on CUDA.

On CUDA the host is far ahead of the device, so its clock says only when a task was enqueued. There a task lies between
two events, whose times are read once the device has passed them; the host does not wait for this while rounds go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
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
    """Measures tasks that are over when their call returns, on any number of threads; keeps a block that raises too."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def span(self, name: str, row: str, round_index: int) -> AbstractContextManager[None]:
        return self._timeline.span(name, row, round=round_index)

    def resolve(self) -> None: ...


class _Block(NamedTuple):
    name: str
    row: str
    round_index: int
    start: Mark
    end: Mark


class StreamSpans(TaskSpans):
    """Measures tasks enqueued on the streams of a device. Used from one thread.

    A time is that of a moment known on both clocks, plus what has passed on the device's clock since: if the two clocks
    drift apart, spans follow the device. Making one blocks the host until the first stream is idle.

    Args:
        timeline: gets the spans.
        mark: records an event on the stream of a row, without blocking the host.
        first: the row on whose stream the common moment is measured.
        shared: whether all rows are of one stream.
    """

    def __init__(self, timeline: Timeline, mark: Callable[[str], Mark], first: str, shared: bool = False) -> None:
        self._timeline, self._mark, self._shared = timeline, mark, shared
        self._blocks: dict[str, deque[_Block]] = {}  # by stream, as origins are: those of one stream end in order
        mark(first).synchronize()  # host–device synchronisation: the stream must be idle before the moment
        before_ns, origin = timeline.clock(), mark(first)
        origin.synchronize()  # host–device synchronisation
        self._moment = origin, (before_ns + timeline.clock()) // 2
        self._origins: dict[str, tuple[Mark, int]] = {}

    @contextmanager
    def span(self, name: str, row: str, round_index: int) -> Iterator[None]:
        """Measure a block, unless it raises. Records an event on either side; the host does not block."""
        stream = "" if self._shared else row
        blocks, start = self._blocks.setdefault(stream, deque()), self._mark(row)
        yield
        blocks.append(_Block(name, row, round_index, start, self._mark(row)))
        # Blocks that the device has passed are read now, so that events do not pile up in long epochs.
        while blocks and blocks[0].end.query():
            self._read(stream, blocks.popleft())

    def resolve(self) -> None:
        for stream, blocks in self._blocks.items():
            if blocks:
                blocks[-1].end.synchronize()  # host–device synchronisation
            while blocks:
                self._read(stream, blocks.popleft())

    def _read(self, stream: str, block: _Block) -> None:
        origin, origin_ns = self._origins.get(stream, self._moment)
        start_ns = origin_ns + round(origin.elapsed_time(block.start) * _NS_PER_MS)
        if start_ns - origin_ns >= _FARTHEST_MS * _NS_PER_MS:
            self._origins[stream] = origin, origin_ns = block.start, start_ns
        end_ns = origin_ns + round(origin.elapsed_time(block.end) * _NS_PER_MS)
        self._timeline.add(block.name, block.row, start_ns, end_ns, {"round": block.round_index})


def spans_on(device: torch.device, timeline: Timeline) -> TaskSpans:
    """Return the spans of tasks on a device; on CUDA, of those on its current stream."""
    if device.type != "cuda":
        return HostSpans(timeline)

    def mark(_: str) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return StreamSpans(timeline, mark, "", shared=True)
