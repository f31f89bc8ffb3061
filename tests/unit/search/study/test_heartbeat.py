"""A thread that gives signs of life: it begins, ends, and tells what went wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from crossbow_py.search.study.heartbeat import Heartbeat


class Beats:
    """Counts them, and raises in those whose numbers are given."""

    def __init__(self) -> None:
        self.count, self.is_needed = 0, True
        self.failing: set[int] = set()
        self.lock = threading.RLock()
        self.heartbeat = Heartbeat(self.beat, lambda: self.is_needed, self.lock, 0.005)

    def beat(self) -> None:
        self.count += 1
        if self.count in self.failing:
            raise ValueError(f"beat {self.count}")

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        limit = time.monotonic() + 30.0
        while not is_so():
            assert time.monotonic() < limit
            time.sleep(0.002)

    def run_to(self, count: int) -> None:
        """So many beats and no more: later ones are not needed."""
        with self.lock:
            self.is_needed = True
            inner, last = self.heartbeat._beat, self.count + count

            def last_beat() -> None:
                self.is_needed = self.count + 1 < last
                inner()

            self.heartbeat._beat = last_beat
            self.heartbeat.start()
        self.wait_for(lambda: not self.heartbeat.is_running)
        self.heartbeat._beat = inner


@pytest.fixture
def beats() -> Iterator[Beats]:
    made = Beats()
    yield made
    made.heartbeat.close()


def test_heartbeat_beats_until_nothing_is_needed_and_begins_again(beats: Beats) -> None:
    beats.run_to(3)
    assert beats.count == 3
    beats.run_to(2)
    assert beats.count == 5


def test_heartbeat_started_twice_has_one_thread(beats: Beats) -> None:
    before = threading.active_count()
    beats.heartbeat.start()
    beats.heartbeat.start()
    assert threading.active_count() == before + 1
    beats.heartbeat.close()
    assert threading.active_count() == before and not beats.heartbeat.is_running


def test_error_of_the_last_beat_is_raised_once(beats: Beats) -> None:
    beats.failing = {2, 3}
    beats.run_to(3)
    with pytest.raises(ValueError, match="beat 3"):
        beats.heartbeat.raise_error()
    beats.heartbeat.raise_error()


def test_error_that_passed_is_forgotten(beats: Beats) -> None:
    beats.failing = {1, 2}
    beats.run_to(3)
    beats.heartbeat.raise_error()


def test_heartbeat_closed_in_a_beat_waits_for_it(beats: Beats) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go.wait(30.0)
        beats.count += 1

    beats.heartbeat._beat = slow
    beats.heartbeat.start()
    assert begun.wait(30.0)
    closing = threading.Thread(target=beats.heartbeat.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go.set()
    closing.join(30.0)
    assert not closing.is_alive() and beats.count == 1 and not beats.heartbeat.is_running
