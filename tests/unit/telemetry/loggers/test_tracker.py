"""The courier: what is delivered when, and what happens to a delivery that fails. The id of a run in its folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.telemetry.loggers.tracker import Courier, known_id, refusing
from tests.trackers import MemoryTracker


def await_true(what: Callable[[], object]) -> None:
    end_s = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end_s, "what was waited for did not come"
        time.sleep(0.001)


def test_points_and_calls_are_delivered_in_their_order_when_it_ends() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)
    courier.add(10, {"a": 1.0})
    courier.add(20, {"a": 2.0})
    courier.do(tracker.file, Path("x"))
    courier.add(30, {"a": 3.0})
    courier.do(tracker.end, "finished", 30, {}, {})
    assert tracker.calls == []
    assert courier.finish() == []
    assert [name for name, _ in tracker.calls] == ["log", "file", "log", "end"]
    assert [(point.samples_seen, point.values) for point in tracker.points] == [
        (10, {"a": 1.0}), (20, {"a": 2.0}), (30, {"a": 3.0}),
    ]  # fmt: skip


def test_values_at_the_same_samples_become_one_point_of_the_newer_values() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)
    courier.add(10, {"a": 1.0, "b": 1.0})
    courier.add(10, {"a": 2.0, "c": 3.0})
    courier.finish()
    assert [point.values for point in tracker.points] == [{"a": 2.0, "b": 1.0, "c": 3.0}]


def test_points_are_delivered_while_the_run_goes_on() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=0.001)
    courier.add(10, {"a": 1.0})
    await_true(lambda: tracker.points)
    courier.add(20, {"a": 2.0})
    await_true(lambda: len(tracker.points) == 2)
    courier.finish()
    assert [point.samples_seen for point in tracker.points] == [10, 20]


def test_whoever_adds_does_not_wait_for_a_service_that_hangs() -> None:
    tracker = MemoryTracker()
    tracker.may_go_on.clear()
    courier = Courier(tracker, every_s=0.001)
    courier.add(10, {"a": 1.0})
    begun_s = time.monotonic()
    for samples in range(20, 1000):
        courier.add(samples, {"a": 1.0})
    assert courier.finish(timeout_s=0.05) == ["Service did not take everything in time."]
    assert time.monotonic() - begun_s < 5
    tracker.may_go_on.set()


def test_what_fails_is_told_once_and_delivered_when_the_service_is_back() -> None:
    tracker = MemoryTracker()
    tracker.error = ConnectionError("http://me:secret@host refuses.")
    courier = Courier(tracker, every_s=0.001)
    courier.add(10, {"a": 1.0})
    said: list[str] = []
    await_true(lambda: said.append(courier.problem() or "") or said[-1])
    assert said[-1] == (
        "Service takes nothing (ConnectionError: http://host refuses); training goes on, and what it misses is sent "
        "again."
    )
    courier.add(20, {"a": 2.0})
    tracker.error = None
    assert courier.finish() == []
    assert courier.problem() is None
    assert [point.samples_seen for point in tracker.points] == [10, 20]


def test_what_still_fails_in_the_end_does_not_keep_the_rest_back_and_is_told() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)

    def refused() -> None:
        raise ValueError("no such name")

    courier.do(refused)
    courier.add(10, {"a": 1.0})
    problem, end = courier.finish()
    assert problem.startswith("Service takes nothing (ValueError: no such name)")
    assert end == "Service did not take everything."
    assert [point.samples_seen for point in tracker.points] == [10]


def test_id_is_kept_in_the_folder_and_changes_with_the_run(tmp_path: Path) -> None:
    for before, after in [(None, "a1"), ("a1", "a1"), ("a1", "b2"), ("b2", "b2")]:
        with known_id(tmp_path, "service.json") as known:
            assert known.value == before
            known.value = after
    assert (tmp_path / "service.json").read_text() == '{"run_id": "b2"}\n'


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", '{"run_id": 3}', '{"run_id": "../../x"}', "[" * 100_000])
def test_file_that_has_no_id_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "service.json").write_text(text)
    with known_id(tmp_path, "service.json") as known:
        assert known.value is None


def test_link_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    (tmp_path / "service.json").symlink_to(elsewhere)
    with pytest.raises(UserError, match="cannot be written"), known_id(tmp_path, "service.json") as known:
        known.value = "a1"
    assert elsewhere.read_text() == ""


def test_service_that_refuses_at_the_start_is_one_sentence_without_a_password() -> None:
    with pytest.raises(UserError) as refused, refusing(MemoryTracker(), "Service at http://host", "start it"):
        raise OSError("http://me:secret@host/api\nfailed.")
    assert str(refused.value) == (
        "logger=[service]: Service at http://host cannot record the run (OSError: http://host/api failed); start it, "
        "or leave service out."
    )
