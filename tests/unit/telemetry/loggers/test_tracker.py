"""The courier: what is delivered when, and what happens to a delivery that fails. The id of a run in its folder."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crossbow_py.core.errors import UserError
from crossbow_py.telemetry.loggers.tracker import END, Courier, known_id, refusing, without_password
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
    courier.do("x", tracker.file, Path("x"))
    courier.add(30, {"a": 3.0})
    courier.do("end", tracker.end, "finished", 30, {}, {})
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
    await_true(lambda: said.extend(courier.problems()) or said)
    assert said == [
        "Service did not take points (ConnectionError: http://host refuses); training goes on, and what it misses is "
        "sent again."
    ]
    courier.add(20, {"a": 2.0})
    tracker.error = None
    assert courier.finish() == []
    assert courier.problems() == []
    assert [point.samples_seen for point in tracker.points] == [10, 20]


def test_what_still_fails_in_the_end_does_not_keep_the_rest_back_and_is_told() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)

    for name in ("a.txt", "b.txt"):
        courier.do(name, refused)
    courier.add(10, {"a": 1.0})
    assert courier.finish() == ["Service did not take a.txt, b.txt (ValueError: no such name)."]
    assert [point.samples_seen for point in tracker.points] == [10]


def refused() -> None:
    raise ValueError("no such name")


def test_what_is_always_refused_keeps_nothing_back_and_is_left_out_by_name() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)
    courier.do("predictions", refused)
    said = []
    for samples in (10, 20, 30, 40):
        courier.add(samples, {"a": 1.0})
        courier._deliver()
        assert tracker.points[-1].samples_seen == samples
        said.append(courier.problems())
    assert said == [
        [
            "Service did not take predictions (ValueError: no such name); training goes on, and what it misses is sent "
            "again."
        ],
        [],
        ["Service did not take predictions (ValueError: no such name), tried 3 times; it is left out."],
        [],
    ]
    assert courier.finish() == []


def test_service_that_takes_nothing_for_long_gets_all_when_it_is_back() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)
    tracker.error = ConnectionError("gone")
    courier.do("x", tracker.file, Path("x"))
    for samples in range(10):
        courier.add(samples, {"a": 1.0})
        courier._deliver()
    tracker.error = None
    assert courier.finish() == []
    assert tracker.of("file") == ["x"]
    assert [point.samples_seen for point in tracker.points] == list(range(10))


def test_service_that_takes_nothing_is_asked_twice_for_all_points_and_gets_the_last_of_each_name() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)
    tracker.error = ConnectionError("gone")
    for samples in range(5):
        courier.add(samples, {"a": 1.0})
        courier.do("predictions", tracker.file, Path(f"predictions_{samples}"))
        courier.do("counts", tracker.file, Path(f"counts_{samples}"))
        asked = tracker.asked
        courier._deliver()
        assert tracker.asked - asked <= 6  # two of the points, and this picture and the one before of each name
    courier.do(END, tracker.end, "finished", 5, {}, {})
    tracker.error = None
    assert courier.finish() == []
    assert tracker.of("file") == ["predictions_4", "counts_4"]
    assert [point.samples_seen for point in tracker.points] == list(range(5))
    assert tracker.calls[-1][0] == "end"


@pytest.mark.parametrize("refused", range(4))
def test_points_that_are_refused_keep_no_others_of_an_outage_back(refused: int) -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)
    tracker.error = ConnectionError("gone")
    for samples in range(4):
        courier.add(samples, {"a": 1.0})
        courier._deliver()
    tracker.error, tracker.refused = None, refused
    for _ in range(2):
        courier._deliver()
    assert sorted(point.samples_seen for point in tracker.points) == sorted({0, 1, 2, 3} - {refused})
    assert courier.finish() == ["Service did not take points (ValueError: no such point)."]


def test_what_fails_in_the_last_delivery_is_tried_again_before_the_run_ends() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)
    tracker.error, tracker.fails = ConnectionError("a moment"), 1
    courier.add(10, {"a": 1.0})
    courier.do(END, tracker.end, "finished", 10, {}, {})
    assert courier.finish() == []
    assert [name for name, _ in tracker.calls] == ["log", "end"]


def test_points_that_are_refused_are_kept_to_the_end() -> None:
    tracker, refuses = MemoryTracker(), True
    taken = tracker.log

    def log(points: object) -> None:
        if refuses:
            raise ValueError("locked")
        taken(points)  # type: ignore[arg-type]

    tracker.log = log  # type: ignore[method-assign]
    courier = Courier(tracker, every_s=1000.0)
    courier.add(10, {"a": 1.0})
    for _ in range(5):
        courier.do("x", tracker.file, Path("x"))
        courier._deliver()
    refuses = False
    assert courier.finish() == []
    assert [point.samples_seen for point in tracker.points] == [10]


def test_picture_that_failed_does_not_come_after_a_newer_one_of_its_name() -> None:
    tracker = MemoryTracker()
    courier = Courier(tracker, every_s=1000.0)
    tracker.error = ConnectionError("gone")
    courier.do("predictions", tracker.file, Path("old"))
    courier.do("other", tracker.file, Path("other"))
    courier._deliver()
    courier._jobs[0].call = refused  # the old one alone
    tracker.error = None
    courier.do("predictions", tracker.file, Path("new"))
    courier._deliver()
    assert courier.finish() == []
    assert tracker.of("file") == ["other", "new"]


def test_id_is_kept_in_the_folder_and_changes_with_the_run(tmp_path: Path) -> None:
    for before, after in [(None, "a1"), ("a1", "a1"), ("a1", "b2"), ("b2", "b2")]:
        with known_id(tmp_path, "service.json") as known:
            assert known.value == before
            known.value = after
    assert (tmp_path / "service.json").read_text() == '{"run_id": "b2"}\n'


def test_disk_that_takes_nothing_leaves_the_id_that_there_was(tmp_path: Path) -> None:
    with known_id(tmp_path, "service.json") as known:
        known.value = "a1"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(UserError, match="cannot be written"), known_id(tmp_path, "service.json") as known:
            known.value = "b2"
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "service.json").read_text() == '{"run_id": "a1"}\n'


def test_longer_text_in_the_file_is_gone_when_the_id_is_there(tmp_path: Path) -> None:
    (tmp_path / "service.json").write_text("x" * 100)
    with known_id(tmp_path, "service.json") as known:
        known.value = "a1"
    assert (tmp_path / "service.json").read_text() == '{"run_id": "a1"}\n'


def test_network_that_fails_meanwhile_is_not_taken_for_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="gone"), known_id(tmp_path, "service.json"):
        raise ConnectionError("gone")


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
        raise OSError("http://me:sec@ret@host/api?password=secret.\nMore on this error.")
    assert str(refused.value) == (
        "logger=[service]: Service at http://host cannot record the run (OSError: http://host/api?password=***); "
        "start it, or leave service out."
    )


def test_paragraph_that_a_service_raises_is_cut_in_the_middle_to_200_characters() -> None:
    with pytest.raises(UserError) as refused, refusing(MemoryTracker(), "Service", "start it"):
        raise OSError(450 * "x" + 450 * "y")
    assert f"(OSError: {91 * 'x'} ... {100 * 'y'}); start it" in str(refused.value)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://u:p@ss@127.0.0.1:1", "http://127.0.0.1:1"),
        ("http://token@host/a@b", "http://host/a@b"),
        ("postgresql://u:p/w@host/x", "postgresql://host/x"),
        ("postgresql://u:p@s/w@host/x", "postgresql://host/x"),
        ("not reached: postgresql://u:p/w@s@host:5432/x, sqlite:///a", "not reached: postgresql://host:5432/x, sqlite:///a"),
        ("postgresql://host/x?user=me&password=p@ss&sslmode=require", "postgresql://host/x?user=me&password=***&sslmode=require"),
        ("mysql://host/x?passwd=secret", "mysql://host/x?passwd=***"),
        ("sqlite:///runs/a.db", "sqlite:///runs/a.db"),
    ],
)  # fmt: skip
def test_address_is_shown_without_passwords(address: str, shown: str) -> None:
    assert without_password(address) == shown
