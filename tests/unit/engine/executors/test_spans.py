"""Spans of tasks: on the host's clock, and of a stream that runs behind the host, played by a stand-in for a device."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.executors.spans import HostSpans, StreamSpans, spans_on
from crossbow_py.telemetry.timeline import Timeline
from tests.support import CPU, make_tasks, plan, run

US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000


class Device:
    """A host's clock in ns, and a stream whose work is over at `tail_ns`; what is enqueued costs the host nothing."""

    def __init__(self) -> None:
        self.now_ns = self.tail_ns = 7 * SECOND
        self.num_waits = 0

    def clock(self) -> int:
        return self.now_ns

    def enqueue(self, duration_ns: int) -> None:
        self.tail_ns = max(self.tail_ns, self.now_ns) + duration_ns

    def mark(self) -> Mark:
        self.enqueue(0)
        return Mark(self, self.tail_ns)


class Mark:
    """As torch.cuda.Event: times are float32 milliseconds between moments the device has passed."""

    def __init__(self, device: Device, time_ns: int) -> None:
        self.device, self.time_ns = device, time_ns

    def query(self) -> bool:
        return self.device.now_ns >= self.time_ns

    def synchronize(self) -> None:
        if not self.query():
            self.device.now_ns = self.time_ns
            self.device.num_waits += 1

    def elapsed_time(self, end: Mark) -> float:
        assert self.query() and end.query(), "an event was read before the device had passed it"
        return float(np.float32((end.time_ns - self.time_ns) / MS))


def spans_of(timeline: Timeline) -> list[tuple[str, str, int, int]]:
    return [(span.name, span.row, span.start_ns, span.end_ns) for span in timeline._spans]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def timeline(device: Device) -> Timeline:
    return Timeline(clock=device.clock)


def test_spans_of_a_stream_are_when_its_work_ran_and_not_when_it_was_enqueued(
    device: Device, timeline: Timeline
) -> None:
    spans = StreamSpans(timeline, lambda row: device.mark(), "learner 0")
    for name, duration_ns in (("learning", 5 * MS), ("correction", 2 * MS)):
        with spans.span(name, "learner 0", 3):
            device.enqueue(duration_ns)
    assert device.now_ns == 7 * SECOND
    spans.resolve()
    assert spans_of(timeline) == [
        ("learning", "learner 0", 7 * SECOND, 7 * SECOND + 5 * MS),
        ("correction", "learner 0", 7 * SECOND + 5 * MS, 7 * SECOND + 7 * MS),
    ]
    assert [span.args for span in timeline._spans] == [{"round": 3}, {"round": 3}]


def test_spans_of_a_stream_are_read_once_passed_and_the_host_waits_in_resolve_alone(
    device: Device, timeline: Timeline
) -> None:
    spans = StreamSpans(timeline, lambda row: device.mark(), "learner 0")
    for index in range(6):
        with spans.span("learning", "learner 0", index):
            device.enqueue(4 * MS)
        device.now_ns += MS
    assert device.num_waits == 0
    assert len(spans_of(timeline)) == 1  # the host has come to 5 ms
    spans.resolve()
    assert (device.num_waits, len(spans_of(timeline))) == (1, 6)
    spans.resolve()
    assert (device.num_waits, len(spans_of(timeline))) == (1, 6)


def test_spans_of_hours_stay_exact_and_apart(device: Device, timeline: Timeline) -> None:
    spans = StreamSpans(timeline, lambda row: device.mark(), "learner 0")
    expected = []
    for index in range(2000):
        if index % 100 == 0:
            device.now_ns += 600 * SECOND  # an evaluation
        expected.append(max(device.tail_ns, device.now_ns))
        with spans.span("learning", "learner 0", index):
            device.enqueue(20 * MS + 300)
        spans.resolve()
    found = spans_of(timeline)
    assert all(abs(end - start - 20 * MS - 300) < 200 for _, _, start, end in found)
    assert all(before[3] <= after[2] for before, after in pairwise(found))
    # Ten minutes are told to 0.03 ms, once an evaluation.
    assert max(abs(span[2] - start) for span, start in zip(found, expected, strict=True)) < MS


def test_block_of_a_stream_that_raises_is_left_out_and_the_error_goes_on(device: Device, timeline: Timeline) -> None:
    spans = StreamSpans(timeline, lambda row: device.mark(), "learner 0")
    with pytest.raises(ZeroDivisionError), spans.span("learning", "learner 0", 0):
        _ = 1 // 0
    spans.resolve()
    assert spans_of(timeline) == []


def test_spans_of_several_streams_are_told_from_one_moment_and_all_resolved(timeline: Timeline, device: Device) -> None:
    class Stream(Device):
        """Another stream of the device: work of its own, the same clock."""

        def clock(self) -> int:
            return device.now_ns

        def enqueue(self, duration_ns: int) -> None:
            self.tail_ns = max(self.tail_ns, device.now_ns) + duration_ns

        def mark(self) -> Mark:
            self.enqueue(0)
            return Mark(device, self.tail_ns)

    first, second = Stream(), Stream()
    second.enqueue(3 * MS)  # busy when the trace begins
    rows = {"learner 0": first, "learner 1": second}
    spans = StreamSpans(timeline, lambda row: rows[row].mark(), "learner 0")
    for stream, row in ((first, "learner 0"), (second, "learner 1"), (first, "learner 0")):
        with spans.span("learning", row, 0):
            stream.enqueue(5 * MS)
    assert (device.num_waits, spans_of(timeline)) == (0, [])
    spans.resolve()
    assert spans_of(timeline) == [
        ("learning", "learner 0", 7 * SECOND, 7 * SECOND + 5 * MS),
        ("learning", "learner 0", 7 * SECOND + 5 * MS, 7 * SECOND + 10 * MS),
        ("learning", "learner 1", 7 * SECOND + 3 * MS, 7 * SECOND + 8 * MS),
    ]


def test_spans_on_a_cpu_are_the_hosts() -> None:
    assert isinstance(spans_on(CPU, Timeline()), HostSpans)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_executor_that_traces_has_a_span_of_every_task_on_the_row_of_its_stream(executor: str) -> None:
    timeline, tasks = Timeline(), make_tasks(num_learners=2)
    runner = EXECUTORS[executor](tasks)
    runner.trace(timeline)
    run(runner, tasks, 2)
    found = sorted((span.args["round"], span.name, span.row) for span in timeline._spans)
    assert found == [
        (n, name, row)
        for n in range(2)
        for name, row in [
            ("averaging", "averaging"),
            ("correction", "learner 0"), ("correction", "learner 1"),
            ("learning", "learner 0"), ("learning", "learner 1"),
        ]
    ]  # fmt: skip


def test_span_of_a_task_that_fails_is_kept_on_the_host() -> None:
    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    timeline, tasks = Timeline(), make_tasks()
    tasks.loss = fail
    runner = EXECUTORS["serial"](tasks)
    runner.trace(timeline)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        runner.submit(plan(tasks, 0))
    assert [(span.name, span.row) for span in timeline._spans] == [("learning", "learner 0")]


def test_executor_that_does_not_trace_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("a span was measured")

    monkeypatch.setattr(Timeline, "span", measured)
    monkeypatch.setattr(Timeline, "add", measured)
    tasks = make_tasks()
    runner = EXECUTORS["serial"](tasks)
    with runner.span("pass", "all learners", 0):
        runner.submit(plan(tasks, 0))
    assert len(runner.drain()) == 1
