"""The timeline of a run: spans on rows, written as a trace that Perfetto and chrome://tracing read.

A row is a stream by its name ("learner 0", "averaging"), so that averaging can be seen to overlap the next round's
learning. The file is in the Trace Event Format: complete events ("X") with one thread id per row, and metadata events
("M") that name the process and the rows.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from crossbow_py.telemetry.events import NotingListener, RunInfo, Summary
from crossbow_py.telemetry.records import write_atomically

TRACE_FILE = "trace.json"
LAST_ROW = "averaging"
MAX_SPANS = 200_000
_NS_PER_US = 1000
_NUMBERED = re.compile(r"(.*?)(\d+)")

SpanValue = str | int | float | None


class _Span(NamedTuple):
    name: str
    row: str
    start_ns: int
    end_ns: int
    args: Mapping[str, SpanValue]


class Timeline:
    """Collects spans from any number of threads, and writes them when the run is over or at any time before.

    When it is full it keeps the first spans and counts the rest: they show the warm-up and the steady state, which
    later rounds only repeat, and no span is moved or dropped while a thread records.

    Args:
        max_spans: how many spans are kept; each takes about 0.4 kB of memory and 0.13 kB of the file.
        clock: monotonic nanoseconds; `add` expects times on the same clock.
    """

    def __init__(self, max_spans: int = MAX_SPANS, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.clock = clock
        self._max_spans = max_spans
        # Learners' threads append without a lock, which list.append does not need. Between the check for room and the
        # append another thread may fill the list: such spans are cut off, and counted, when the list is read.
        self._spans: list[_Span] = []
        self._refused = 0
        self._refused_lock = threading.Lock()

    @contextmanager
    def span(self, name: str, row: str, /, **args: SpanValue) -> Iterator[None]:
        """Record the time of the block, even if it raises.

        Args:
            name: the task, for example "learning".
            row: the row that shows it, for example "learner 0".
            args: values shown with the span, for example `round=12, learner=0`.
        """
        start_ns = self.clock()
        try:
            yield
        finally:
            self.add(name, row, start_ns, self.clock(), args)

    def add(self, name: str, row: str, start_ns: int, end_ns: int, args: Mapping[str, SpanValue] | None = None) -> None:
        """Record a span measured elsewhere, such as by CUDA events, in nanoseconds of this timeline's clock."""
        assert end_ns >= start_ns, f"{name} on {row} ends {start_ns - end_ns} ns before it starts"
        if len(self._spans) < self._max_spans:
            self._spans.append(_Span(name, row, start_ns, end_ns, args or {}))
        else:
            with self._refused_lock:
                self._refused += 1

    @property
    def kept_spans(self) -> int:
        """Return the number of spans that `write` would write."""
        return min(len(self._spans), self._max_spans)

    @property
    def dropped_spans(self) -> int:
        """Return the number of spans that came when the timeline was full."""
        return self._refused + max(0, len(self._spans) - self._max_spans)

    def trace(self) -> dict[str, Any]:
        """Return the trace as plain values. Times are microseconds since the start of the earliest span."""
        spans = self._spans[: self._max_spans]
        # The longer of two spans that start together comes first: viewers nest a span in the one before it.
        spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
        origin_ns = spans[0].start_ns if spans else 0
        thread_ids = {row: index for index, row in enumerate(ordered_rows(span.row for span in spans), start=1)}
        named = {"ph": "M", "pid": os.getpid()}
        events: list[dict[str, Any]] = [{**named, "name": "process_name", "args": {"name": "crossbow_py"}}]
        for row, tid in thread_ids.items():
            events.append({**named, "tid": tid, "name": "thread_name", "args": {"name": row}})
            events.append({**named, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        for span in spans:
            start_us, length_us = (span.start_ns - origin_ns) / _NS_PER_US, (span.end_ns - span.start_ns) / _NS_PER_US
            args = {key: _shown(value) for key, value in span.args.items()}
            where = {"pid": os.getpid(), "tid": thread_ids[span.row], "ts": start_us, "dur": length_us}
            events.append({"ph": "X", "name": span.name, **where, "args": args})
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"kept_spans": len(spans), "dropped_spans": self.dropped_spans},
        }

    def write(self, path: Path) -> None:
        """Write the trace to `path`, whole or not at all, in a folder that exists. Raises OSError."""
        # A value that JSON has no type for is written as text, so that a wrong argument does not cost the trace.
        write_atomically(path, json.dumps(self.trace(), allow_nan=False, default=str) + "\n")


class TimelineFile(NotingListener):
    """Writes a timeline into the run's folder when the run ends, whatever the status.

    Args:
        timeline: holds the spans of this process; a second call of `fit` adds to it and writes it again.
        folder: the run's folder.
    """

    def __init__(self, timeline: Timeline, folder: Path) -> None:
        self._timeline, self._path = timeline, folder / TRACE_FILE

    def on_start(self, info: RunInfo) -> None:
        """Remove the file of an earlier process, which would be taken for this one's."""
        self._path.unlink(missing_ok=True)

    def on_end(self, summary: Summary) -> None:
        timeline = self._timeline
        try:
            timeline.write(self._path)
        except OSError as error:
            self._notes += (f"No timeline was written to {self._path} ({error}).",)
            return
        if timeline.dropped_spans:
            self._notes += (
                f"The timeline has the first {timeline.kept_spans:,} tasks of the run; the {timeline.dropped_spans:,} "
                "after them were dropped.",
            )
        elif not timeline.kept_spans:
            self._notes += (f"The timeline is empty: executor={summary.executor} recorded no task.",)


def ordered_rows(rows: Iterable[str]) -> list[str]:
    """Return each row once, in the order shown: numbered ones by number, then others by name, and averaging last."""

    def order(row: str) -> tuple[int, str, int]:
        if row == LAST_ROW:
            return 2, row, 0
        numbered = _NUMBERED.fullmatch(row)
        return (0, numbered[1], int(numbered[2])) if numbered else (1, row, 0)

    return sorted(set(rows), key=order)


def _shown(value: SpanValue) -> SpanValue:
    """Return a number that is not finite as text: JSON has no value for it, and text tells more than null."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
