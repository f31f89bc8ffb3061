"""Traces of spans whose times are set by hand, read back as a viewer would."""

from __future__ import annotations

import json
import math
import os
import threading
from itertools import pairwise
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


def row_names(timeline: Timeline) -> dict[int, str]:
    events = timeline.trace()["traceEvents"]
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def overlap_us(events: list[dict[str, Any]], first: tuple[str, int], second: tuple[str, int]) -> float:
    """Microseconds during which a span of task and round `first` runs beside one of `second`."""

    def chosen(task: str, round_index: int) -> list[dict[str, Any]]:
        return [event for event in events if event["name"] == task and event["args"]["round"] == round_index]

    return sum(
        max(0.0, float(min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"])))
        for a in chosen(*first)
        for b in chosen(*second)
    )


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


def test_times_with_an_earlier_span_added_later_start_at_the_earlier(timeline: Timeline) -> None:
    timeline.add("averaging", "averaging", 900 * US, 950 * US)
    timeline.add("learning", "learner 0", 100 * US, 800 * US)
    assert [(event["name"], event["ts"], event["dur"]) for event in spans_of(timeline)] == [
        ("learning", 0.0, 700.0),
        ("averaging", 800.0, 50.0),
    ]


def test_spans_that_start_together_come_longest_first(timeline: Timeline) -> None:
    timeline.add("forward", "learner 0", 0, 1 * US)
    timeline.add("learning", "learner 0", 0, 3 * US)
    assert [event["name"] for event in spans_of(timeline)] == ["learning", "forward"]


def test_add_with_an_end_before_the_start_is_refused(timeline: Timeline) -> None:
    with pytest.raises(AssertionError, match="learning on learner 0 ends 5 ns before it starts"):
        timeline.add("learning", "learner 0", 15, 10)


def test_overlap_of_averaging_with_the_next_rounds_learning_is_seen(timeline: Timeline) -> None:
    for learner in (0, 1):
        row = f"learner {learner}"
        timeline.add("learning", row, 0, 10 * MS, {"round": 0})
        timeline.add("correction", row, 10 * MS, 11 * MS, {"round": 0})
        timeline.add("learning", row, 11 * MS, 20 * MS, {"round": 1})
    timeline.add("averaging", "averaging", 11 * MS, 13 * MS, {"round": 0})
    events = spans_of(timeline)
    assert overlap_us(events, ("averaging", 0), ("learning", 1)) == 2 * 2000
    assert overlap_us(events, ("averaging", 0), ("correction", 0)) == 0


def test_rows_of_all_kinds_come_by_number_then_by_name_and_averaging_last() -> None:
    rows = ["averaging", "learner 10", "evaluation", "learner 2", "copies", "learner 0", "learner 2"]
    assert ordered_rows(rows) == ["learner 0", "learner 2", "learner 10", "copies", "evaluation", "averaging"]


def test_metadata_of_a_trace_names_the_process_and_sorts_the_rows(timeline: Timeline) -> None:
    for row in ("averaging", "learner 1", "learner 0"):
        timeline.add("task", row, 0, 1)
    pid = os.getpid()
    metadata = [event for event in timeline.trace()["traceEvents"] if event["ph"] == "M"]
    assert metadata[0] == {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": "crossbow_py"}}
    assert row_names(timeline) == {1: "learner 0", 2: "learner 1", 3: "averaging"}
    indices = {event["tid"]: event["args"] for event in metadata if event["name"] == "thread_sort_index"}
    assert indices == {tid: {"sort_index": tid} for tid in (1, 2, 3)}
    assert {event["tid"] for event in spans_of(timeline)} == {1, 2, 3}


def test_timeline_when_full_keeps_the_first_spans_and_counts_the_others(clock: FakeClock) -> None:
    timeline = Timeline(max_spans=2, clock=clock)
    for index in range(5):
        timeline.add(f"task {index}", "learner 0", index, index + 1)
    assert timeline.dropped_spans == 3
    assert [event["name"] for event in spans_of(timeline)] == ["task 0", "task 1"]
    assert timeline.trace()["otherData"] == {"kept_spans": 2, "dropped_spans": 3}


def test_timeline_filled_by_many_threads_loses_no_span_and_no_count() -> None:
    timeline, ready = Timeline(max_spans=5000), threading.Barrier(8)

    def record(learner: int) -> None:
        ready.wait()
        for round_index in range(1000):
            with timeline.span("learning", f"learner {learner}", round=round_index):
                pass

    threads = [threading.Thread(target=record, args=(learner,)) for learner in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = spans_of(timeline)
    assert len(events) == 5000
    assert timeline.dropped_spans == 3000
    for tid in row_names(timeline):
        rounds = [event["args"]["round"] for event in events if event["tid"] == tid]
        assert all(before < after for before, after in pairwise(rounds))


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


def test_file_of_an_empty_timeline_is_a_trace_without_spans(timeline: Timeline, tmp_path: Path) -> None:
    timeline.write(tmp_path / "trace.json")
    read = strict((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in read["traceEvents"]] == ["process_name"]
    assert read["otherData"] == {"kept_spans": 0, "dropped_spans": 0}


def test_file_with_arguments_json_has_no_word_for_is_json_all_the_same(timeline: Timeline, tmp_path: Path) -> None:
    unforeseen: Any = Path("batch")
    args = {"loss": math.nan, "rate": -math.inf, "batch": unforeseen, "note": 'a "quote"\n\ud800', "nothing": None}
    timeline.add("learning", "learner 0", 0, 1, args)
    timeline.write(tmp_path / "trace.json")
    read = strict((tmp_path / "trace.json").read_text())
    assert read["traceEvents"][-1]["args"] == {
        "loss": "nan", "rate": "-inf", "batch": "batch", "note": 'a "quote"\n\ud800', "nothing": None,
    }  # fmt: skip


def test_file_in_a_folder_that_is_not_there_raises_oserror(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        timeline.write(tmp_path / "missing" / "trace.json")


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
