"""Executors on a GPU: what serial gives, in graphs captured once and eagerly, with the host a round ahead."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Independent, SynchronousSGD
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.models import MODELS
from crossbow_py.telemetry.timeline import Timeline
from tests import networks
from tests.gpu.support import (
    HAS_KERNELS,
    Counting,
    Eager,
    assert_as_serial,
    needs_gpu,
    needs_kernels,
    run,
    slow_if_simulated,
    tasks_on_cuda,
)
from tests.support import (
    assert_learners_equal,
    bank_reseeded_in_the_middle,
    features,
    norm_with_dropout,
    plan,
    poison,
)
from tests.thinned import pairs, thinned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures_work")]

# Dropout and attention; BatchNorm; dropout of channels; 1-D BatchNorm and transposed convolution; tied and frozen.
NETWORKS = [
    networks.Transformer, networks.SqueezeExcite, networks.DepthwiseSeparable, networks.Conv1d, networks.Tied,
]  # fmt: skip
FUSED_GRAPHS = ["round"] if HAS_KERNELS else ["round", "averaging"]  # operators move z in a graph of their own
of_both = pytest.mark.parametrize("executor", [FusedExecutor, StreamsExecutor])


def graphs_of(executor):
    """Of three learners."""
    return sorted(FUSED_GRAPHS if executor is FusedExecutor else ["averaging", *(f"step({j})" for j in range(3))])


def resnet20():
    torch.manual_seed(1)
    return MODELS["resnet20"]().build((3, 32, 32), 10)


def deep_model():
    """Enough work on few multiprocessors that kernels of two learners can run at once."""
    torch.manual_seed(4)
    layers = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(12):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Counting, Eager], ids=["graphs", "eager"])
@pytest.mark.parametrize("rule", [SMA(), SMA(averaging_period=3)], ids=["every", "third"])
@pytest.mark.parametrize("network", NETWORKS)
def test_fused_after_twenty_rounds_in_float64_equals_serial(network, rule, kind):
    def make():
        torch.manual_seed(1)
        return network()

    own = {"make_model": make, "data": networks.inputs_for(network), "rule": rule}
    device, _ = assert_as_serial(FusedExecutor, 20, kind=kind, **own)
    if kind is Counting:
        # With a period some rounds average, the next ones pull, and others do neither.
        assert device.captured.count("round") == (1 if rule.averaging_period == 1 else 3)


@pytest.mark.parametrize(
    ("rule", "order", "optimizer"),
    pairs(
        [SMA(), SMA(averaging_period=3), Independent()],
        ["rows", "blocks"],
        [SGD(weight_decay=1e-3), SGD(nesterov=True, clip_norm=0.5), AdamW(weight_decay=0.1)],
        quick=3,
    ),
    ids=repr,
)
def test_streams_after_twenty_rounds_in_float64_equal_serial(optimizer, order, rule):
    assert_as_serial(StreamsExecutor, 20, optimizer=optimizer, order=order, rule=rule)


@pytest.mark.parametrize(
    ("executor", "optimizer"),
    thinned(
        itertools.product(
            [FusedExecutor, StreamsExecutor],
            [SGD(nesterov=True, clip_norm=0.5, weight_decay=1e-3), AdamW(weight_decay=0.1)],
        ),
        quick=[0, 3],
    ),
)
def test_dropout_and_a_rate_that_changes_every_round_capture_once_and_equal_serial(executor, optimizer):
    device, _ = assert_as_serial(
        executor, 20, rate=lambda n: 0.1 / (n + 1), make_model=norm_with_dropout, optimizer=optimizer
    )
    assert sorted(device.captured) == graphs_of(executor)
    assert device.num_replays == len(device.captured) * (20 - WARM_UP_ROUNDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "num_learners"),
    [*((FusedExecutor, number) for number in range(1, 9)), *((StreamsExecutor, number) for number in (1, 8, 32))],
)
def test_any_number_of_learners_equals_serial(executor, num_learners):
    assert_as_serial(executor, 8, num_learners=num_learners)


@pytest.mark.parametrize(
    ("executor", "rule", "num_learners"), pairs([FusedExecutor, StreamsExecutor], [SMA(), SynchronousSGD()], [2, 3])
)
def test_gradients_are_compared_as_by_serial(executor, rule, num_learners):
    found = {}
    for kind in (executor, SerialExecutor):
        tasks = tasks_on_cuda(num_learners=num_learners, rule=rule, compares=True)
        runner = kind(tasks)
        outcomes = [outcome for n in range(18) for outcome in runner.submit(plan(tasks, n))] + runner.drain()
        runner.close()
        found[kind] = [outcome.comparison for outcome in outcomes]
    assert sum(each is not None for each in found[executor]) == 5
    for ours, expected in zip(found[executor], found[SerialExecutor], strict=True):
        assert ours == (None if expected is None else pytest.approx(expected, rel=1e-8))


@pytest.mark.parametrize(
    ("num_rounds", "executor"),
    thinned(
        itertools.product([WARM_UP_ROUNDS, WARM_UP_ROUNDS + 1, WARM_UP_ROUNDS + 2], [FusedExecutor, StreamsExecutor]),
        quick=[2, 3, 4],
        slow=[5],
    ),
)
def test_batch_norm_counts_neither_warm_up_nor_capture(executor, num_rounds):
    _, tasks = assert_as_serial(executor, num_rounds)
    assert tasks.bank.learner_state(0)["1.num_batches_tracked"].item() == num_rounds


@of_both
def test_round_in_float32_equals_serial(executor):
    assert_as_serial(executor, 1, tolerance=1e-5, precision=FP32)


@pytest.mark.parametrize(("executor", "most"), [(FusedExecutor, 0.02), (StreamsExecutor, 0.01)])
def test_bf16_follows_serial_in_graphs_and_keeps_the_shadow(executor, most):
    ours, reference = (tasks_on_cuda(precision=BF16, optimizer=SGD(momentum=0.0)) for _ in range(2))
    device = Counting(ours.bank.device)
    run(lambda tasks: executor(tasks, device), ours, 5)
    run(SerialExecutor, reference, 5)
    assert (ours.bank.z.storage - reference.bank.z.storage).norm() <= most * reference.bank.z.storage.norm()
    assert torch.equal(ours.bank.shadow.storage, ours.bank.weights.storage.bfloat16())
    assert sorted(device.captured) == graphs_of(executor)


def test_independent_learners_that_share_their_batches_equal_serial():
    banks = []
    for executor in (FusedExecutor, SerialExecutor):
        tasks = tasks_on_cuda(norm_with_dropout, rule=Independent())
        runner = executor(tasks)
        for n in range(8):
            runner.submit(dataclasses.replace(plan(tasks, n, 0.05), starts=(n * 4,) * 3))
        runner.drain()
        runner.close()
        banks.append(tasks.bank)
    assert_learners_equal(*banks)


@pytest.mark.parametrize("executor", thinned([FusedExecutor, StreamsExecutor], quick=[0], slow=[1]))
def test_bank_that_grows_and_shrinks_goes_on_as_under_serial(executor):
    banks = []
    for kind in (executor, SerialExecutor):
        tasks, cursor = tasks_on_cuda(num_learners=1, optimizer=AdamW()), 0
        for num_learners in (1, 4, 2, 3):
            tasks.bank.resize(num_learners)
            runner = kind(tasks)
            for _ in range(5):
                runner.submit(plan(tasks, cursor, 0.01))
                cursor += 1
            runner.drain()
            runner.close()
        banks.append(tasks.bank)
    assert_learners_equal(*banks)


def test_learner_reseeded_in_the_middle_goes_on_as_under_serial():
    banks = [bank_reseeded_in_the_middle(each, tasks_on_cuda(optimizer=AdamW()))
             for each in (StreamsExecutor, SerialExecutor)]  # fmt: skip
    assert_learners_equal(*banks)


@of_both
@pytest.mark.parametrize("poisoned", [0, WARM_UP_ROUNDS + 1])
def test_non_finite_learner_keeps_its_row_to_the_bit_and_adds_nothing_to_z(executor, poisoned):
    tasks = tasks_on_cuda(precision=FP32, optimizer=AdamW(clip_norm=1.0))
    poison(tasks, plan(tasks, poisoned).starts[1], math.nan)
    bank, runner = tasks.bank, executor(tasks)
    for n in range(poisoned):
        runner.submit(plan(tasks, n))
    runner.drain()
    parts = [*bank.weights.flat(1), *(part for rows in bank.state.values() for part in rows.flat(1))]
    before, others = [part.clone() for part in parts], bank.weights.flat(0)[0].clone()
    outcomes = runner.submit(plan(tasks, poisoned)) + runner.drain()
    runner.close()
    assert outcomes[0].non_finite_learners == [1]
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
    assert not torch.equal(bank.weights.flat(0)[0], others)
    if executor is StreamsExecutor:
        assert not any(part.count_nonzero() for part in bank.corrections.flat(1))
    assert bank.z.storage.isfinite().all()


@needs_kernels
@pytest.mark.parametrize("precision", [FP32, BF16], ids=lambda precision: precision.name)
def test_resnet20_is_captured_whole_and_loops_over_nothing(precision):
    tasks = tasks_on_cuda(resnet20, precision=precision, data=features(256, (3, 32, 32), 10), batch_size=16)
    device = Counting(tasks.bank.device)
    runner = FusedExecutor(tasks, device)
    losses = [loss for loss, _ in run(lambda _: runner, tasks, 12)]
    assert (runner.notes, runner.looped, device.captured) == ([], [], ["round"])
    assert device.num_replays == 12 - WARM_UP_ROUNDS
    assert all(math.isfinite(loss) for loss in losses)


@slow_if_simulated
def test_memory_does_not_grow_with_the_number_of_executors():
    tasks, held = tasks_on_cuda(resnet20, precision=FP32, data=features(256, (3, 32, 32), 10), batch_size=8), []
    for _ in range(3):
        for num_learners in (1, 4, 8, 2):
            tasks.bank.resize(num_learners)
            runner = FusedExecutor(tasks)
            for n in range(WARM_UP_ROUNDS + 2):
                runner.submit(plan(tasks, n))
            runner.drain()
            runner.close()
            del runner
        gc.collect()
        torch.cuda.empty_cache()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    (allocated, reserved), *later = held
    assert all(one <= allocated and other <= reserved for one, other in later), held


def traced(executor, num_rounds, **options):
    """The spans of so many rounds, all of which lie between two looks at the clock."""
    tasks, timeline = tasks_on_cuda(**options), Timeline()
    begin_ns = timeline.clock()
    runner = executor(tasks)
    runner.trace(timeline)
    run(lambda _: runner, tasks, num_rounds)
    end_ns = timeline.clock()
    spans = timeline._spans
    assert all(begin_ns <= span.start_ns < span.end_ns <= end_ns + 1_000_000 for span in spans)
    for row in {span.row for span in spans}:
        own = [span for span in spans if span.row == row]
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(own))
    return spans


def test_trace_of_fused_rounds_has_a_span_a_round():
    found = [(span.name, span.row, span.args["round"]) for span in traced(FusedExecutor, 6)]
    assert found == [("round", "all learners", n) for n in range(6)]


@slow_if_simulated
def test_trace_of_streams_has_every_task_on_its_row_and_averaging_after_the_corrections():
    spans = traced(StreamsExecutor, 8, make_model=deep_model, precision=FP32, data=features(512, (3, 16, 16)))
    assert len(spans) == 8 * 7
    assert {span.row for span in spans} == {"learner 0", "learner 1", "learner 2", "averaging"}
    for n in range(8):
        of_round = [span for span in spans if span.args["round"] == n]
        (averaging,) = (span for span in of_round if span.name == "averaging")
        corrected_ns = max(span.end_ns for span in of_round if span.name == "correction")
        assert corrected_ns <= averaging.start_ns + 1000  # events of two streams, told to 0.5 µs each


def test_model_that_draws_on_the_device_learns_without_graphs():
    class Draws(nn.Linear):
        def forward(self, inputs):
            return nn.functional.dropout(super().forward(inputs), 0.5)

    tasks = tasks_on_cuda(lambda: nn.Sequential(nn.Flatten(), Draws(108, 3)))
    device = Counting(tasks.bank.device)
    runner = StreamsExecutor(tasks, device)
    run(lambda _: runner, tasks, 5)
    assert len(runner.notes) == 1
    assert not [name for name in device.captured if name.startswith("learning")]


LOSS_THAT_ASKS = """
from torch import nn
from crossbow_py.engine.executors.fused import FusedExecutor
from tests.gpu.support import tasks_on_cuda
from tests.support import plan

def loss(output, targets):
    found = nn.functional.cross_entropy(output, targets)
    return found * (2 if found.item() > 0 else 1)

tasks = tasks_on_cuda(order="blocks")
tasks.loss = loss
runner = FusedExecutor(tasks)
outcomes = [outcome for n in range(6) for outcome in runner.submit(plan(tasks, n))] + runner.drain()
assert [outcome.finite for outcome in outcomes] == [[True] * 3] * 6
assert tasks.bank.step_counts == [6] * 3
print(*(note for note in runner.notes if "CUDA graphs" in note), sep="\\n")
runner.close()
"""
MODEL_THAT_ASKS = """
import torch
from torch import nn
from crossbow_py.engine.executors.streams import StreamsExecutor
from tests.gpu.support import tasks_on_cuda
from tests.support import plan

class Asks(nn.Linear):
    def forward(self, inputs):
        output = super().forward(inputs)
        return output * (2 if output.mean().item() > 0 else 1)

tasks = tasks_on_cuda(lambda: nn.Sequential(nn.Flatten(), Asks(108, 3)))
runner = StreamsExecutor(tasks)
for n in range(6):
    runner.submit(plan(tasks, n))
runner.drain()
print("\\n".join(runner.notes))
runner.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "beginning"),
    [
        (LOSS_THAT_ASKS, "CUDA graphs are not used: round cannot"),
        (MODEL_THAT_ASKS, "CUDA graphs are not used: step(0)"),
    ],
    ids=["fused", "streams"],
)
def test_what_makes_the_host_wait_runs_eagerly_and_says_so_in_one_line(program, beginning, request):
    # In a process of its own: after a capture that failed, nothing else is captured.
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=request.config.rootpath, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith(beginning)


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # of the profiler
def test_kernels_of_two_learners_run_at_the_same_time(tmp_path):
    tasks = tasks_on_cuda(
        deep_model, precision=FP32, num_learners=4, data=features(1024, (3, 32, 32)), batch_size=32
    )  # fmt: skip
    runner = StreamsExecutor(tasks)
    for n in range(WARM_UP_ROUNDS + 2):
        runner.submit(plan(tasks, n))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for n in range(WARM_UP_ROUNDS + 2, WARM_UP_ROUNDS + 5):
            runner.submit(plan(tasks, n))
        runner.drain()
    runner.close()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = sorted(
        (event["ts"], event["ts"] + event["dur"], event["args"]["stream"])
        for event in events
        if event.get("cat") == "kernel"
    )
    assert len({stream for *_, stream in kernels}) >= 4
    assert any(second[0] < first[1] and second[2] != first[2] for first, second in itertools.pairwise(kernels)), (
        "no two streams ran kernels at the same time"
    )
