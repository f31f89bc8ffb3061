"""executor=streams without a GPU: what it asks of the device, in which order, and that this order is enough."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from crossbow_py.averaging import Crossbow, Independent
from crossbow_py.core.errors import LearnerError, UserError
from crossbow_py.core.host import prepare_environment
from crossbow_py.engine.device.graphs import CudaStreams
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.scheduler import learner_stream
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.telemetry.timeline import Timeline
from tests.recording_streams import RecordingStreams, ShuffledStreams
from tests.support import (
    IMAGES,
    Changed,
    assert_equal,
    assert_learners_equal,
    linear_model,
    make_tasks,
    norm_model,
    norm_with_dropout,
    plan,
    run,
)
from tests.thinned import pairs


def test_rounds_say_that_they_are_graphs_from_when_they_are():
    tasks = make_tasks()
    runner, said = StreamsExecutor(tasks, RecordingStreams()), []
    for n in range(3):
        runner.submit(plan(tasks, n))
        said.append(runner.in_effect())
    runner.drain()
    assert said == [[], [], ["graphs"]]
    runner.close()


@pytest.mark.parametrize("make_device", [RecordingStreams, lambda: ShuffledStreams(1)], ids=["at once", "shuffled"])
def test_trace_has_a_row_a_learner_and_one_for_averaging_told_by_the_devices_clock(make_device):
    tasks, timeline = make_tasks(num_learners=3, rule=Crossbow(averaging_period=2)), Timeline()
    runner = StreamsExecutor(tasks, make_device())
    runner.trace(timeline)
    run(runner, tasks, 6)
    found = sorted((span.args["round"], span.name, span.row) for span in timeline._spans)
    rows = [(name, f"learner {j}") for name in ("correction", "learning") for j in range(3)]
    assert found == [
        (n, *task) for n in range(6) for task in [*[("averaging", "averaging")] * (n % 2), *rows]
    ]  # fmt: skip
    for row in {span.row for span in timeline._spans}:
        spans = [span for span in timeline._spans if span.row == row]
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(spans))
    # Everything a device runs takes a millisecond: load and learning, graphs or not, are two of them. Where streams run
    # in any order, others may run in between.
    for span in timeline._spans:
        took_ms = (span.end_ns - span.start_ns) / 1e6
        least = 1 if span.name == "averaging" else 2
        assert took_ms == least if make_device is RecordingStreams else took_ms >= least


def test_after_a_drain_every_stream_waits_for_what_the_caller_enqueued():
    tasks, device = make_tasks(), RecordingStreams()
    runner = StreamsExecutor(tasks, device)
    runner.submit(plan(tasks, 0))
    runner.drain()
    device.log.clear()
    runner.submit(plan(tasks, 1))
    runner.close()
    assert device.log[:4] == ["caller record caller#2", *(f"{s} wait caller#2" for s in ("s0", "s1", "high"))]
    assert not [entry for entry in device.log if entry.endswith("high#1")]


def test_executor_is_ready_once_the_round_before_the_last_is_over_on_every_learners_stream():
    tasks, device = make_tasks(rule=Independent()), ShuffledStreams(0)
    runner = StreamsExecutor(tasks, device)
    for n in range(2):
        assert runner.is_ready()  # with one in flight there is none to wait for
        runner.submit(plan(tasks, n), wait=False)
    first, second = (runner._rounds.streams[learner_stream(j)] for j in range(2))
    asked = []
    for stream in (first, second):
        asked.append(runner.is_ready())
        while stream.entries:
            assert stream.entries.popleft()()
    assert asked == [False, False] and runner.is_ready()
    assert [outcome.plan.index for outcome in runner.collect()] == [0]
    runner.close()


@pytest.mark.parametrize(
    ("optimizer", "make_model", "order"),
    pairs(
        [SGD(weight_decay=1e-3), SGD(nesterov=True, clip_norm=0.5), AdamW()],
        [norm_model, norm_with_dropout],
        ["rows", "blocks"],
        quick=3,
    ),
)
def test_streams_after_twenty_rounds_in_float64_equal_serial(optimizer, make_model, order):
    ours, reference = (
        make_tasks(make_model, num_learners=3, optimizer=optimizer, data=IMAGES, order=order) for _ in range(2)
    )
    found = run(StreamsExecutor(ours, RecordingStreams()), ours, 20)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 20))


def test_without_waits_the_same_orders_give_something_else():
    ours, reference = (make_tasks(norm_model, num_learners=3, data=IMAGES) for _ in range(2))
    run(StreamsExecutor(ours, ShuffledStreams(0, deaf=True)), ours, 20)
    run(SerialExecutor(reference), reference, 20)
    with pytest.raises(AssertionError):
        assert_learners_equal(ours.bank, reference.bank)


def test_learning_rate_that_changes_every_round_captures_nothing_anew():
    def rate(index):
        return 0.1 / (index + 1)

    tasks, reference, device = make_tasks(optimizer=AdamW()), make_tasks(optimizer=AdamW()), RecordingStreams()
    found = run(StreamsExecutor(tasks, device), tasks, 8, rate)
    assert_equal(tasks.bank, reference.bank, found, run(SerialExecutor(reference), reference, 8, rate))
    captured = sorted(entry.split()[2] for entry in device.log if "capture" in entry)
    assert captured == ["averaging", "step(0)", "step(1)"]


def test_failing_replay_raises_with_task_round_and_stream():
    class Breaks(RecordingStreams):
        def replay(self, graph, stream):
            raise RuntimeError("no luck")

    tasks = make_tasks()
    runner = StreamsExecutor(tasks, Breaks())
    with pytest.raises(
        LearnerError, match=r"learning\(0\) failed in round 2 on learner 0: RuntimeError: no luck"
    ) as caught:
        for n in range(3):
            runner.submit(plan(tasks, n))
    runner.close()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_batch_of_another_shape_is_refused_with_the_remedy():
    tasks = make_tasks()
    tasks.feed = Changed(tasks.feed, lambda start, found: found if start < 16 else found.map(lambda each: each[:3]))
    with pytest.raises(UserError, match=r"batches of one shape, got \[3, 4\] .* after \[4, 4\] .*executor=serial"):
        run(StreamsExecutor(tasks, RecordingStreams()), tasks, 3)


def test_close_with_a_round_in_flight_on_a_broken_device_does_not_raise():
    class Gone(RecordingStreams):
        def synchronize(self):
            raise RuntimeError("device lost")

    tasks = make_tasks()
    runner = StreamsExecutor(tasks, Gone())
    runner.submit(plan(tasks, 0))
    runner.close()
    runner.close()


def test_one_learner_runs_without_an_averaging_task():
    ours, reference = (make_tasks(linear_model, num_learners=1) for _ in range(2))
    device = RecordingStreams()
    found = run(StreamsExecutor(ours, device), ours, 5)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 5))
    assert [entry for entry in device.log if entry.startswith("high")] == ["high wait caller#1"]


def test_bank_that_is_not_on_cuda_is_refused_with_the_remedy():
    with pytest.raises(UserError, match="executor=streams runs on CUDA only, and device is cpu; set executor=auto"):
        StreamsExecutor(make_tasks())
    with pytest.raises(UserError, match="runs on CUDA only"):
        CudaStreams(torch.device("cpu"))


@pytest.mark.parametrize(("started", "before", "after"), [(False, None, "32"), (False, "8", "8"), (True, None, None)])
def test_hardware_queues_are_asked_for_before_cuda_starts_unless_the_user_has(monkeypatch, started, before, after):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", before)
    try:
        prepare_environment()
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == after
    finally:
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
