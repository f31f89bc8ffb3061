"""SIGTERM and Ctrl-C become a flag, and the process's own handlers come back."""

from __future__ import annotations

import signal
import threading

import pytest

from crossbow_py.core.signals import StopSignal

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_signal_sets_the_status_and_nothing_else(number, status):
    with StopSignal(enabled=True) as stop:
        assert stop.status is None
        signal.raise_signal(number)
        assert stop.status == status


def test_handlers_are_restored_also_after_an_error():
    before = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(ValueError, match="inside"), StopSignal(enabled=True):
        assert [signal.getsignal(number) for number in NUMBERS] != before
        raise ValueError("inside")
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_second_ctrl_c_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), StopSignal(enabled=True):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_disabled_installs_no_handler():
    before = [signal.getsignal(number) for number in NUMBERS]
    with StopSignal(enabled=False):
        assert [signal.getsignal(number) for number in NUMBERS] == before


def test_outside_the_main_thread_no_handler_is_installed_and_nothing_fails():
    statuses = []

    def use():
        with StopSignal(enabled=True) as stop:
            statuses.append(stop.status)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert statuses == [None]
