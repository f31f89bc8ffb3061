"""Traces of spans whose times are set by hand, read back as a viewer would."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from crossbow_py.telemetry.timeline import Timeline, TimelineFile, ordered_rows
from tests.unit.telemetry.conftest import FakeClock

US, MS = 1_000, 1_000_000  # nanoseconds


@pytest.fixture
def timeline(clock: FakeClock) -> Timeline:
    return Timeline(clock=clock)


def strict(text: str) -> Any:
    """Parse as JSON proper, without Python's NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def spans_of(timeline: Timeline) -> list[dict[str, Any]]:
    return [event for event in timeline.trace()["traceEvents"] if event["ph"] == "X"]


def test_span_of_a_block_is_a_complete_event_in_microseconds_from_zero(timeline: Timeline, clock: FakeClock) -> None:
    with timeline.span("learning", "learner 0", round=12, learner=0):
        clock.advance(2_500_500)
    clock.advance(MS)
    with timeline.span("correction", "learner 0", round=12, learner=0):
        clock.advance(250 * US)
    pid = os.getpid()
    assert spans_of(timeline) == [
        {"ph": "X", "name": "learning", "pid": pid, "tid": 1, "ts": 0.0, "dur": 2500.5,
         "args": {"round": 12, "learner": 0}},
        {"ph": "X", "name": "correction", "pid": pid, "tid": 1, "ts": 3500.5, "dur": 250.0,
         "args": {"round": 12, "learner": 0}},
    ]  # fmt: skip


def test_span_of_a_block_that_raises_is_kept_and_the_error_goes_on(timeline: Timeline, clock: FakeClock) -> None:
    with pytest.raises(ZeroDivisionError), timeline.span("learning", "learner 0"):
        clock.advance(3 * US)
        _ = 1 // 0
    assert [event["dur"] for event in spans_of(timeline)] == [3.0]


def test_rows_of_all_kinds_come_by_number_then_by_name_and_averaging_last() -> None:
    rows = ["averaging", "learner 10", "evaluation", "learner 2", "copies", "learner 0", "learner 2"]
    assert ordered_rows(rows) == ["learner 0", "learner 2", "learner 10", "copies", "evaluation", "averaging"]


def test_timeline_when_full_keeps_the_first_spans_and_counts_the_others(clock: FakeClock) -> None:
    timeline = Timeline(max_spans=2, clock=clock)
    for index in range(5):
        timeline.add(f"task {index}", "learner 0", index, index + 1)
    assert timeline.dropped_spans == 3
    assert [event["name"] for event in spans_of(timeline)] == ["task 0", "task 1"]
    assert timeline.trace()["otherData"] == {"kept_spans": 2, "dropped_spans": 3}


def test_timeline_when_threads_race_for_the_last_place_keeps_to_its_bound(clock: FakeClock) -> None:
    timeline = Timeline(max_spans=1, clock=clock)

    class Racing(list[Any]):
        """Another thread appends after the check for room and before this append."""

        def append(self, span: Any) -> None:
            super().append(span)
            super().append(span._replace(name="late"))

    timeline._spans = Racing()
    timeline.add("first", "learner 0", 0, 1)
    assert [event["name"] for event in spans_of(timeline)] == ["first"]
    assert timeline.dropped_spans == 1


def test_file_of_a_timeline_is_its_trace_and_replaces_an_older_one(timeline: Timeline, tmp_path: Path) -> None:
    timeline.add("learning", "learner 0", 0, 1500, {"round": 0})
    path = tmp_path / "trace.json"
    path.write_text("older")
    timeline.write(path)
    read = strict(path.read_text())
    assert read == timeline.trace()
    assert read["displayTimeUnit"] == "ms"
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_timeline_file_of_a_run_is_there_at_its_end_and_an_older_one_is_gone_at_its_start(
    timeline: Timeline, tmp_path: Path, events: Any
) -> None:
    (tmp_path / "trace.json").write_text("of an earlier process")
    file = TimelineFile(timeline, tmp_path)
    file.on_start(events.run_info())
    assert list(tmp_path.iterdir()) == []
    timeline.add("learning", "learner 0", 0, 1, {"round": 0})
    file.on_end(events.summary())
    assert strict((tmp_path / "trace.json").read_text()) == timeline.trace()
    assert file.take_notes() == []


def test_timeline_file_that_cannot_be_written_or_has_no_task_says_so_once(
    timeline: Timeline, tmp_path: Path, events: Any
) -> None:
    missing, empty = TimelineFile(timeline, tmp_path / "missing"), TimelineFile(timeline, tmp_path)
    missing.on_end(events.summary())
    (note,) = missing.take_notes()
    assert note.startswith(f"No timeline was written to {tmp_path}/missing/trace.json (")
    empty.on_end(events.summary(executor="streams"))
    assert empty.take_notes() == ["The timeline is empty: executor=streams recorded no task."]
    assert empty.take_notes() == missing.take_notes() == []
