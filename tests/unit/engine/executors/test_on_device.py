"""What executors on a device have in common: what serial gives, and what the host waits for."""

from __future__ import annotations

import contextlib
import math
import threading

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Crossbow, Independent
from crossbow_py.core.errors import LearnerError
from crossbow_py.distributed.collective import Collective
from crossbow_py.distributed.idle_clock import IdleClock
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.scheduler import AVERAGING_STREAM
from crossbow_py.engine.update.optimizers import AdamW
from crossbow_py.telemetry.timeline import Timeline
from tests.recording_streams import RecordingStreams, ShuffledStreams
from tests.support import (
    IMAGES,
    Changed,
    assert_equal,
    assert_learners_equal,
    bank_reseeded_in_the_middle,
    make_tasks,
    norm_model,
    norm_with_dropout,
    plan,
    poison,
    run,
    run_rounds,
)
from tests.thinned import thinned

EXECUTORS = pytest.mark.parametrize("executor", [FusedExecutor, StreamsExecutor])


def twice(*arguments, order="blocks", **options):
    """The tasks of a run and those of its reference."""
    return [make_tasks(*arguments, order=order, **options) for _ in range(2)]


@EXECUTORS
@pytest.mark.parametrize("seed", thinned(range(4), quick=[0], slow=[1]))
@pytest.mark.parametrize("rule", [SMA(), SMA(averaging_period=3), Independent()], ids=["every", "third", "independent"])
def test_any_order_that_streams_and_events_allow_gives_what_serial_gives(executor, seed, rule):
    ours, reference = twice(norm_with_dropout, num_learners=3, rule=rule, data=IMAGES)
    found = run(executor(ours, ShuffledStreams(seed)), ours, 12)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 12))


@EXECUTORS
@pytest.mark.parametrize(("precision", "rounds", "tolerance"), [(FP32, 1, 1e-5), (BF16, 1, 0.02), (BF16, 4, 0.02)])
def test_rounds_in_lower_precision_follow_serial(executor, precision, rounds, tolerance):
    ours, reference = twice(norm_model, data=IMAGES, precision=precision)
    run(executor(ours, RecordingStreams()), ours, rounds)
    run(SerialExecutor(reference), reference, rounds)
    left, right = ours.bank.weights.storage, reference.bank.weights.storage
    assert (left - right).norm() <= tolerance * right.norm()
    if precision is BF16:
        assert torch.equal(ours.bank.shadow.storage, ours.bank.weights.storage.bfloat16())


@EXECUTORS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("poisoned", [0, WARM_UP_ROUNDS + 1])
def test_non_finite_learner_keeps_its_row_and_adds_nothing_to_z(executor, bad, poisoned):
    tasks = make_tasks(rule=SMA(), order="blocks")
    tasks.feed = Changed(tasks.feed)
    runner, bank = executor(tasks, RecordingStreams()), tasks.bank
    for n in range(poisoned):
        runner.submit(plan(tasks, n))
    runner.drain()
    kept = [*bank.weights.flat(1), *bank.state["momentum"].flat(1)]
    before, z = [part.clone() for part in kept], bank.z.shaped()["weight"].clone()
    whole = plan(tasks, poisoned)
    poison(tasks, whole.starts[1], bad)
    (outcome,) = runner.submit(whole) + runner.drain()
    assert outcome.non_finite_learners == [1]
    assert not math.isfinite(outcome.losses[1])
    assert all(map(torch.equal, kept, before))
    assert bank.corrections.shaped(1)["weight"].count_nonzero() == 0
    expected = z + 0.5 * (bank.weights.shaped(0)["weight"] - z)
    torch.testing.assert_close(bank.z.shaped()["weight"], expected, rtol=1e-12, atol=1e-12)
    assert bank.step_counts[:2] == [poisoned + 1, poisoned]
    runner.close()


@EXECUTORS
def test_learner_reseeded_in_the_middle_goes_on_as_under_serial(executor):
    ours, reference = twice(norm_model, num_learners=3, optimizer=AdamW(), data=IMAGES)
    bank_reseeded_in_the_middle(lambda tasks: executor(tasks, RecordingStreams()), ours)
    bank_reseeded_in_the_middle(SerialExecutor, reference)
    assert ours.bank.step_counts == [10, 5, 10]
    assert_learners_equal(ours.bank, reference.bank)


@EXECUTORS
def test_task_that_is_no_classification_reports_no_correct_predictions(executor):
    targets = torch.randn(16, 3, dtype=torch.float64)  # the model's
    tasks = make_tasks(data=(torch.randn(16, 4), targets), order="blocks")
    tasks.loss = nn.functional.mse_loss
    outcomes = run(executor(tasks, RecordingStreams()), tasks, 4)
    assert {right for outcome in outcomes for right in outcome.num_correct} == {None}


@pytest.mark.parametrize(
    ("executor", "label", "failed"),
    [
        (FusedExecutor, "s0#1", "round failed in round 0 on all learners"),
        (StreamsExecutor, "s1#1", r"correction\(1\) failed in round 0 on learner 1"),
        (StreamsExecutor, "high#2", "averaging failed in round 1 on averaging"),
    ],
)
def test_failure_that_only_the_device_saw_is_raised_with_the_stream_it_ended(executor, label, failed):
    class Fails(RecordingStreams):
        def synchronize_event(self, event):
            if event.label == label:
                raise RuntimeError("illegal memory access")

    tasks = make_tasks(order="blocks")
    with pytest.raises(LearnerError, match=rf"{failed}: RuntimeError: illegal memory"):
        run(executor(tasks, Fails()), tasks, 2)


@EXECUTORS
def test_averaging_that_the_caller_does_between_rounds_is_a_span_of_its_own(executor):
    tasks, timeline = make_tasks(order="blocks"), Timeline()
    runner = executor(tasks, RecordingStreams())
    with runner.span_between("averaging", 0):
        pass
    runner.trace(timeline)
    with runner.span_between("averaging", 7):
        pass
    runner.close()
    (found,) = timeline._spans
    assert (found.name, found.row, found.args["round"]) == ("averaging", AVERAGING_STREAM, 7)


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
    tasks, device = tasks_of_two_devices(Crossbow(averaging_period=period)), SlowSums(0)
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
    reference = make_tasks(num_learners=3, rule=Crossbow(averaging_period=period), order="blocks")
    run_rounds(reference, "serial", 9)
    assert_learners_equal(tasks.bank, reference.bank)


@EXECUTORS
@pytest.mark.parametrize("wait", ["settle", "drain"])
def test_settle_and_drain_wait_for_the_last_average(executor, wait):
    tasks, device = tasks_of_two_devices(Crossbow(averaging_period=2)), RecordingStreams()
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


@EXECUTORS
def test_backward_passes_stay_on_the_thread_that_enqueues_eager_and_captured(executor):
    tasks, seen = make_tasks(order="blocks"), []

    def noted(output, targets):
        seen.append((threading.current_thread(), torch._C._is_multithreading_enabled()))
        return nn.functional.cross_entropy(output, targets)

    assert torch._C._is_multithreading_enabled()
    runner = executor(tasks, RecordingStreams())
    tasks.loss = noted
    run(runner, tasks, WARM_UP_ROUNDS + 2)
    assert len(seen) == 2 * (WARM_UP_ROUNDS + 2)
    assert set(seen) == {(threading.current_thread(), False)}
    assert torch._C._is_multithreading_enabled()


class LateSums(RecordingStreams):
    """The first stream stands still for five milliseconds where it waits for averaging, as for a slow rank."""

    def wait(self, stream, event):
        super().wait(stream, event)
        if stream == "s0" and event.label.startswith("high"):
            self.clock_ms += 5


class HostClock:
    now = 0.0

    def __call__(self):
        return self.now


def timed(executor, device, clock):
    """Two devices, and an executor whose waits for the other one are counted."""
    tasks = tasks_of_two_devices(Crossbow())
    tasks.collective.idle = idle = IdleClock(clock)
    return tasks, executor(tasks, device), idle


@EXECUTORS
def test_waits_of_the_first_stream_for_averaging_over_ranks_are_counted(executor):
    tasks, runner, idle = timed(executor, LateSums(), HostClock())
    for n in range(3):
        runner.submit(plan(tasks, n))
    # The first round waits for no averaging, and the third has not been read.
    assert idle.seconds == pytest.approx(0.005)
    runner.drain()
    assert idle.seconds == pytest.approx(0.010)
    runner.submit(plan(tasks, 3))  # nothing is in flight that it could wait for
    runner.drain()
    runner.close()
    assert idle.seconds == pytest.approx(0.010)


@EXECUTORS
@pytest.mark.parametrize(("host_ms", "least_ms", "most_ms"), [(4, 4, 4), (200, 100, 110)])
def test_waits_of_the_host_count_as_far_as_the_device_had_no_work(executor, host_ms, least_ms, most_ms):
    device, clock = RecordingStreams(), HostClock()
    tasks, runner, idle = timed(executor, device, clock)
    for n in range(2):
        runner.submit(plan(tasks, n))
    with idle.waiting():  # as in an exchange between two rounds
        clock.now += host_ms / 1000
    device.clock_ms += 100  # after a few for what is left of the round, the device has nothing to do
    runner.submit(plan(tasks, 2))
    runner.submit(plan(tasks, 3))
    counted_s = idle.seconds
    assert least_ms - 1e-6 <= counted_s * 1000 <= most_ms + 1e-6
    runner.drain()
    with idle.waiting():  # as in an evaluation, after which the bank may be another
        clock.now += 1.0
    device.clock_ms += 1000
    runner.submit(plan(tasks, 4))
    runner.drain()
    runner.close()
    assert idle.seconds == counted_s


@EXECUTORS
def test_times_are_read_only_once_the_device_has_passed_them(executor):
    tasks, runner, idle = timed(executor, ShuffledStreams(1), HostClock())
    for n in range(6):
        runner.submit(plan(tasks, n))
    runner.drain()
    runner.close()
    assert idle.seconds >= 0.0
    reference = make_tasks(num_learners=3, rule=Crossbow(), order="blocks")
    run_rounds(reference, "serial", 6)
    assert_learners_equal(tasks.bank, reference.bank)
