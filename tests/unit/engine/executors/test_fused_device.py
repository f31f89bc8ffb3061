"""Fused rounds on a device without a GPU: what serial gives, in graphs that only launch, the host a round ahead."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Crossbow
from crossbow_py.core.errors import LearnerError
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.device import graphs
from crossbow_py.engine.device.memory import is_out_of_memory
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.telemetry.timeline import Timeline
from tests import networks
from tests.recording_streams import RecordingStreams, ShuffledStreams
from tests.support import (
    IMAGES,
    assert_equal,
    make_tasks,
    norm_with_dropout,
    plan,
    run,
)
from tests.thinned import thinned

OPTIMIZERS = [
    SGD(weight_decay=1e-3), SGD(nesterov=True, clip_norm=0.5), SGD(momentum=(0.5, 0.9, 0.0)), AdamW(weight_decay=0.1),
]  # fmt: skip


class Refuses(RecordingStreams):
    """Captures nothing: every round runs eagerly."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def capture(self, name, body, stream, pool):
        self.asked.append(name)
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


def tasks_for(network, num_learners=3, **options):
    def make():
        torch.manual_seed(1)
        return network()

    return make_tasks(make, num_learners=num_learners, data=networks.inputs_for(network), order="blocks", **options)


@pytest.mark.parametrize("network", thinned(networks.NETWORKS, quick=range(0, 10, 3), slow=range(10)))
def test_every_network_is_captured_and_equals_serial(network):
    ours, reference = (tasks_for(network, num_learners=2) for _ in range(2))
    device = RecordingStreams()
    runner = FusedExecutor(ours, device)
    found = run(runner, ours, 6)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 6))
    assert [entry.split()[2] for entry in device.log if "capture" in entry] == ["round", "averaging"]
    assert not [note for note in runner.notes if "graphs" in note]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_optimizers_with_learning_rates_of_every_round_and_learner_equal_serial(optimizer):
    ours, reference = (
        make_tasks(norm_with_dropout, num_learners=3, optimizer=optimizer, data=IMAGES, order="blocks")
        for _ in range(2)
    )
    device, outcomes = RecordingStreams(), []
    for tasks, runner in ((ours, FusedExecutor(ours, device)), (reference, SerialExecutor(reference))):
        found = []
        for n in range(12):
            rates = (0.1 / (n + 1),) * 3 if n % 3 else (0.01, 0.02 * n, 0.1)
            found += runner.submit(dataclasses.replace(plan(tasks, n), learning_rates=rates))
        outcomes.append(found + runner.drain())
        runner.close()
    assert_equal(ours.bank, reference.bank, *outcomes)
    assert sum("capture" in entry for entry in device.log) == 2


def test_rounds_with_and_without_averaging_are_graphs_of_their_own():
    tasks, device = make_tasks(rule=Crossbow(averaging_period=2), order="blocks"), RecordingStreams()
    run(FusedExecutor(tasks, device), tasks, 12)
    assert sorted(entry.split()[2] for entry in device.log if "capture" in entry) == ["averaging", "round", "round"]


def test_rule_that_makes_ever_new_coefficients_leaves_few_graphs_and_counts_behind():
    ours, reference = (make_tasks(norm_with_dropout, data=IMAGES, order="blocks") for _ in range(2))
    device, outcomes = RecordingStreams(), []
    runner = FusedExecutor(ours, device)

    def changing(tasks, index):
        """Coefficients of three rounds, in which they are captured, and then of one."""
        made, stage = plan(tasks, index), index // 3 if index < 36 else index
        return dataclasses.replace(made, together=dataclasses.replace(made.averaging, correction=0.2 / (1 + stage)))

    for tasks, each in ((ours, runner), (reference, SerialExecutor(reference))):
        found = [outcome for n in range(60) for outcome in each.submit(changing(tasks, n))]
        outcomes.append(found + each.drain())
    captured, released = (sum(f"{what} round" in entry for entry in device.log) for what in ("capture", "release"))
    assert (captured, released) == (12, 4)
    program = runner._on_device._round
    assert (len(program.graphs), len(program.eager_rounds)) == (8, 8)
    runner.close()
    assert_equal(ours.bank, reference.bank, *outcomes)


def test_fused_is_ready_once_the_round_before_the_last_is_over():
    tasks, device = make_tasks(order="blocks"), ShuffledStreams(0)
    runner = FusedExecutor(tasks, device)
    for n in range(2):
        assert runner.is_ready()
        runner.submit(plan(tasks, n), wait=False)
    assert not runner.is_ready()
    device.synchronize()
    assert runner.is_ready() and [outcome.plan.index for outcome in runner.collect()] == [0]
    runner.close()


def test_capture_that_is_refused_runs_rounds_eagerly_tries_no_other_and_says_so_once():
    tasks, device = make_tasks(order="blocks"), Refuses()
    runner = FusedExecutor(tasks, device)
    run(runner, tasks, 6)
    assert runner.notes == [
        "CUDA graphs are not used: round cannot be captured "
        "(RuntimeError: operation not permitted when stream is capturing)."
    ]
    assert device.asked == ["round"]
    assert device.log.count("s0 run round") == device.log.count("s0 run averaging") == 6


def test_after_a_failed_capture_in_the_process_nothing_else_is_captured_but_graphs_replay(monkeypatch):
    tasks, device = make_tasks(order="blocks"), RecordingStreams()
    runner = FusedExecutor(tasks, device)
    try:
        for n in range(4):
            runner.submit(plan(tasks, n))
        monkeypatch.setattr(graphs, "_FAILED_CAPTURES", ["RuntimeError: by another model"])
        for n in range(4, 8):
            runner.submit(plan(tasks, n))
        runner.drain()
    finally:
        runner.close()
    assert device.log.count("s0 replay round") == 6 and runner.notes == []
    later, device = make_tasks(order="blocks"), RecordingStreams()
    runner = FusedExecutor(later, device)
    run(runner, later, 5)
    assert not any("capture" in entry for entry in device.log)
    assert runner.notes == [
        "CUDA graphs are not used: a capture failed in this process (RuntimeError: by another model)."
    ]


def test_switch_runs_rounds_without_graphs_and_they_are_what_serial_gives(monkeypatch):
    monkeypatch.setenv("CROSSBOW_GRAPHS", "0")
    ours, reference = (make_tasks(norm_with_dropout, data=IMAGES, order="blocks") for _ in range(2))
    device = RecordingStreams()
    runner = FusedExecutor(ours, device)
    found, expected = run(runner, ours, 6), run(SerialExecutor(reference), reference, 6)
    assert_equal(ours.bank, reference.bank, found, expected)
    assert not any("capture" in entry for entry in device.log)
    assert runner.notes == ["CUDA graphs are not used: CROSSBOW_GRAPHS is 0."]


def test_loss_that_draws_elsewhere_runs_rounds_eagerly_and_says_so():
    def loss(output, targets):
        return nn.functional.cross_entropy(output, targets) * (1 + torch.rand(()))

    tasks, device = make_tasks(order="blocks"), RecordingStreams()
    tasks.loss = loss
    runner = FusedExecutor(tasks, device)
    run(runner, tasks, 5)
    assert ["draws random numbers" in note for note in runner.notes] == [True]
    assert [entry.split()[2] for entry in device.log if "capture" in entry] == ["averaging"]


def test_capture_that_memory_does_not_hold_is_a_learners_error_and_leaves_no_graph():
    class Full(RecordingStreams):
        def capture(self, name, body, stream, pool):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    tasks, device = make_tasks(order="blocks", optimizer=AdamW()), Full()
    runner = FusedExecutor(tasks, device)
    with pytest.raises(LearnerError, match="round failed in round 2 on all learners: OutOfMemoryError") as caught:
        run(runner, tasks, 3)
    assert is_out_of_memory(caught.value.__cause__)
    assert tasks.bank.step_counts == [2, 2]  # of a round that nobody waited for too
    assert runner.notes == []


class Two(Collective):
    """Two devices, of which the other adds nothing."""

    num_devices = 2


def test_averaging_over_several_devices_is_never_captured_and_runs_beside_the_next_rounds_learning():
    tasks, device = make_tasks(order="blocks"), RecordingStreams()
    tasks.collective = Two()
    run(FusedExecutor(tasks, device), tasks, 4)
    captured = [entry for entry in device.log if "capture" in entry]
    assert captured == ["s0 capture learning", "s0 capture correction"]
    second = device.log[device.log.index("s0 run report") + 1 :]
    second = second[second.index("s0 run load") :]
    assert second[:8] == [
        "s0 run load", "s0 run learning", "s0 wait high#1", "s0 run correction", "s0 run report", "s0 record s0#2",
        "high wait s0#2", "high run averaging",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [SMA(), SMA(averaging_period=3)], ids=["every", "third"])
def test_any_order_that_streams_of_several_devices_allow_gives_what_serial_gives(seed, rule):
    ours, reference = (
        make_tasks(norm_with_dropout, num_learners=3, rule=rule, data=IMAGES, order="blocks") for _ in range(2)
    )
    ours.collective = Two()
    found = run(FusedExecutor(ours, ShuffledStreams(seed)), ours, 12)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 12))


def test_trace_has_a_span_a_round_between_two_times_around_its_launches():
    tasks, device, timeline = make_tasks(order="blocks"), RecordingStreams(), Timeline()
    runner = FusedExecutor(tasks, device)
    runner.trace(timeline)
    run(runner, tasks, 4)
    found = [(span.name, span.row, span.args["round"], span.end_ns - span.start_ns) for span in timeline._spans]
    # load, round, averaging, report: a millisecond each on this device's clock
    assert found == [("round", "all learners", n, 4_000_000) for n in range(4)]


@pytest.mark.parametrize(("make_device", "said"), [(RecordingStreams, ["graphs"]), (Refuses, [])])
def test_fused_rounds_say_whether_they_are_graphs(make_device, said):
    tasks = tasks_for(networks.SqueezeExcite)
    runner = FusedExecutor(tasks, make_device())
    for n in range(4):
        runner.submit(plan(tasks, n))
    runner.drain()
    assert runner.in_effect() == said
    runner.close()
