"""What the host waits for on a device: outcomes without z, everything at a drain, always where the watch sees it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from crossbow_py.averaging import SMA
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from tests.recording_streams import RecordingStreams, ShuffledStreams
from tests.support import assert_learners_equal, make_tasks, plan

EXECUTORS = pytest.mark.parametrize("executor", [FusedExecutor, StreamsExecutor])


class Two(Collective):
    """Two devices, of which the other adds nothing."""

    num_devices = 2

    def __init__(self):
        self.watched = False

    @contextlib.contextmanager
    def awaiting(self):
        assert not self.watched
        self.watched = True
        try:
            yield
        finally:
            self.watched = False


def tasks_of_two_devices(rule, order="blocks"):
    tasks = make_tasks(num_learners=3, rule=rule, order=order)
    tasks.collective = Two()
    return tasks


class SlowSums(ShuffledStreams):
    """The averaging stream does nothing while `held`."""

    held = True

    def new_stream(self, high_priority=False):
        stream = super().new_stream(high_priority)
        if high_priority:
            self.averaging = stream
        return stream

    def _go_on(self):
        streams = self._streams
        if self.held:
            self._streams = [stream for stream in streams if stream is not self.averaging]
        try:
            super()._go_on()
        finally:
            self._streams = streams


@EXECUTORS
@pytest.mark.parametrize("period", [1, 3])
def test_outcomes_come_while_an_average_goes_on_until_a_round_needs_it(executor, period):
    tasks, device = tasks_of_two_devices(SMA(averaging_period=period)), SlowSums(0)
    runner, z = executor(tasks, device), tasks.bank.z.storage.clone()
    # The first average is after round τ − 1, and rounds up to 2τ − 2 do without it; an outcome is a round late.
    seen = [outcome.plan.index for n in range(2 * period) for outcome in runner.submit(plan(tasks, n))]
    assert seen == list(range(2 * period - 1))
    assert torch.equal(tasks.bank.z.storage, z)
    device.held = False
    for n in range(2 * period, 9):
        runner.submit(plan(tasks, n))
    runner.drain()
    runner.close()
    reference = make_tasks(num_learners=3, rule=SMA(averaging_period=period), order="blocks")
    serial = SerialExecutor(reference)
    for n in range(9):
        serial.submit(plan(reference, n))
    assert_learners_equal(tasks.bank, reference.bank)


@EXECUTORS
@pytest.mark.parametrize("wait", ["settle", "drain"])
def test_settle_and_drain_wait_for_the_last_average(executor, wait):
    tasks, device = tasks_of_two_devices(SMA(averaging_period=2)), RecordingStreams()
    runner = executor(tasks, device)
    for n in range(3):
        runner.submit(plan(tasks, n))
    assert "host wait high#1" not in device.log
    getattr(runner, wait)()
    assert device.log[-1] == "host wait high#1"
    device.log.clear()
    runner.drain()
    assert ("host wait high#1" in device.log) == (wait == "settle")
    runner.close()


class Watched(RecordingStreams):
    """The host may wait for the device only where the watch is told, as the device may be in a sum."""

    def __init__(self, collective):
        super().__init__()
        self.collective, self.blocked = collective, set()

    def note(self, name):
        assert self.collective.watched, f"{name} is not seen by the watch"
        self.blocked.add(name)

    def synchronize_event(self, event):
        self.note("synchronize_event")
        super().synchronize_event(event)

    def synchronize(self):
        self.note("synchronize")
        super().synchronize()

    def capture(self, name, body, stream, pool):
        self.note("capture")
        return super().capture(name, body, stream, pool)


@EXECUTORS
def test_wherever_the_host_waits_for_the_device_the_watch_is_told(executor):
    tasks = tasks_of_two_devices(SMA())
    device = Watched(tasks.collective)
    runner = executor(tasks, device)
    for n in range(4):
        runner.submit(plan(tasks, n))
        runner.settle()
    runner.drain()
    runner.submit(plan(tasks, 4))
    runner.drain()
    runner.close()
    assert device.blocked == {"synchronize_event", "synchronize", "capture"}
    assert runner.notes == []
