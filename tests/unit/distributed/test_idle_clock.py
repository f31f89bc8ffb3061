"""The time in which a rank only waits for others, on a clock that tests set; threads take turns by events."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from crossbow_py.distributed.idle_clock import IdleClock


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def idle(clock):
    return IdleClock(clock)


@contextmanager
def on_another_thread(context):
    """Another thread is inside `context` during the block."""
    inside, leave = threading.Event(), threading.Event()

    def enter():
        with context:
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=enter)
    thread.start()
    assert inside.wait(20)
    yield
    leave.set()
    thread.join(20)


def test_wait_beside_which_nothing_computes_counts_whole(clock, idle):
    with idle.waiting():
        clock.now += 3
    clock.now += 10
    assert idle.seconds == 3


def test_wait_inside_a_task_of_the_same_thread_counts_and_the_rest_of_the_task_does_not(clock, idle):
    with idle.computing():
        clock.now += 5
        with idle.waiting():
            clock.now += 2
        clock.now += 5
        assert len(idle.computing_threads) == 1
    assert idle.seconds == 2
    assert not idle.computing_threads


def test_wait_that_ends_while_another_thread_computes_costs_nothing(clock, idle):
    with on_another_thread(idle.computing()), idle.waiting():
        clock.now += 4
    assert idle.seconds == 0


def test_wait_counts_from_when_the_last_thread_that_computed_was_done(clock, idle):
    with idle.waiting():
        with on_another_thread(idle.computing()):
            clock.now += 4  # as learning of the next round beside averaging
        clock.now += 1.5
    assert idle.seconds == 1.5


def test_waits_of_two_threads_at_a_time_count_once(clock, idle):
    with on_another_thread(idle.waiting()):
        clock.now += 1
        with idle.waiting():
            clock.now += 2
        clock.now += 4
    assert idle.seconds == 7  # from 0 to 7 on the other thread


def test_waits_of_the_host_are_kept_where_the_work_is_a_devices(clock, idle):
    idle.by_device = True
    with idle.waiting():
        clock.now += 2
    with idle.waiting():
        clock.now += 1
    assert (idle.seconds, idle.take_host_s(), idle.take_host_s()) == (0.0, 3.0, 0.0)
    idle.add(0.5)
    assert idle.seconds == 0.5
