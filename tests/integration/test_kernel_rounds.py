"""Fused rounds by Triton kernels, in the interpreter: what serial gives, in few launches."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Independent
from crossbow_py.core.errors import LearnerError
from crossbow_py.core.triton_launch import recorded
from crossbow_py.distributed.collective import Collective
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.kernels import batch_norm, convolution, cross_entropy, update
from crossbow_py.engine.modules.precision import BF16, FP32, FP64
from crossbow_py.engine.trust.remember import assumed, forget
from crossbow_py.engine.update.optimizers import SGD, AdamW
from crossbow_py.models import MODELS
from tests.recording_streams import RecordingStreams
from tests.support import (
    assert_equal,
    assert_learners_equal,
    features,
    make_tasks,
    norm_model,
    plan,
    run,
)
from tests.unit.engine.kernels.launches import counted_launches

pytestmark = pytest.mark.slow


class Residual(nn.Module):
    """Two units, the second with a sum; its input has two users."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.conv, self.last = nn.Conv2d(5, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = (self.last(self.conv(x)) + x).relu()
        return self.head(x.mean((2, 3)))


def residual():
    torch.manual_seed(3)
    return Residual()


def deep():
    """Layers that amplify a rounding."""
    torch.manual_seed(3)
    first, *others = (nn.Conv2d(c, 5, 3, padding=1, bias=False) for c in (3, 5, 5, 5, 5, 5, 5))
    units = itertools.chain(*((each, nn.BatchNorm2d(5), nn.ReLU()) for each in others))
    return nn.Sequential(first, *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))


def by_kernels(tasks):
    return FusedExecutor(tasks, RecordingStreams(), kernels=True)


def images(count=24):
    return features(count, (3, 6, 6))


def both(make_model=residual, data=None, **options):
    """Tasks for an executor, and for `serial` beside it."""
    return tuple(make_tasks(make_model, data=data or images(), order="blocks", **options) for _ in range(2))


def assert_as_serial(executor, num_rounds=4, shared=False, **options):
    """Returns the executor, after rounds that give what `serial` gives."""
    ours, reference = both(**options)
    runner = executor(ours)
    found = run(runner, ours, num_rounds, shared=shared)
    expected = run(SerialExecutor(reference), reference, num_rounds, shared=shared)
    assert_equal(ours.bank, reference.bank, found, expected)
    return runner


@pytest.mark.parametrize("wrong", [0.0, 0.8])
def test_kernel_whose_gradient_is_wrong_is_found_out_in_bf16_though_one_rounding_moves_all_gradients(
    wrong, monkeypatch
):
    """As ptxas once left the gradient of filters; the sizes are not those that kernels are checked with."""
    own = convolution.backward

    def backward(*args, filter_gradient, **options):
        found = own(*args, filter_gradient=filter_gradient, **options)
        if filter_gradient is not None and filter_gradient.shape[1] == 5:
            filter_gradient *= 1 - wrong
        return found

    monkeypatch.setattr(convolution, "backward", backward)
    tasks = make_tasks(deep, data=images(), order="blocks", precision=BF16, kernels=True)
    with assumed("kernels", None):
        runner = by_kernels(tasks)
    run(runner, tasks, 1)
    said = [note for note in runner.notes if "gives other numbers than the model itself (the gradient of" in note]
    assert len(said) == (wrong > 0), runner.notes


@pytest.mark.parametrize("optimizer", [SGD(weight_decay=1e-3), AdamW(clip_norm=0.5)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("make_model", [residual, norm_model])
def test_rounds_by_kernels_in_float64_equal_serial(make_model, optimizer):
    runner = assert_as_serial(by_kernels, make_model=make_model, optimizer=optimizer, precision=FP64)
    assert runner.notes == []


@pytest.mark.parametrize(
    ("switch", "families"),
    [
        ("none", set()),
        ("update", {"update"}),
        ("loss", {"cross_entropy"}),
        ("layers", {"batch_norm"}),
        ("update,layers,convolutions", {"update", "batch_norm", "convolution"}),
    ],
)
def test_switch_says_which_kernels_run_and_the_rest_are_operators(switch, families, monkeypatch):
    monkeypatch.setenv("CROSSBOW_KERNELS", switch)
    forget("kernels")
    ours, reference = both(precision=FP32)
    with recorded() as launches:
        runner = by_kernels(ours)
        run(runner, ours, 4)
    run(SerialExecutor(reference), reference, 4)
    assert_learners_equal(ours.bank, reference.bank, 1e-4)
    modules = {each.__name__.rpartition(".")[2]: each for each in (batch_norm, convolution, cross_entropy, update)}
    assert {name for name, own in modules.items() if any(each.kernel in vars(own) for each in launches)} == families
    left_out = [note for note in runner.notes if "CROSSBOW_KERNELS leaves them out" in note]
    assert len(left_out) == len(runner.notes) == len({"update", "loss", "layers"}.difference(switch.split(",")))
    forget("kernels")


@pytest.mark.parametrize(
    "options",
    [
        {"rule": Independent(), "shared": True},
        {"rule": SMA(averaging_period=3), "num_rounds": 6},
        {"optimizer": SGD(momentum=(0.5, 0.9, 0.3))},
        {"optimizer": AdamW(clip_norm=1.0), "rule": SMA(averaging_period=2)},
    ],
    ids=["shared batches", "every third round", "momentum of each", "every second round"],
)
def test_three_learners_in_float64_equal_serial(options):
    assert_as_serial(by_kernels, num_learners=3, data=images(48), **options)


@pytest.mark.parametrize("num_learners", [1, 3])
def test_round_by_kernels_in_float32_equals_serial(num_learners):
    """Convolutions are the implicit-GEMM kernel, with statistics of the norms on the way."""
    ours, reference = both(num_learners=num_learners, precision=FP32)
    runner = by_kernels(ours)
    with counted_launches() as launches:
        run(runner, ours, 1)
    run(SerialExecutor(reference), reference, 1)
    assert_learners_equal(ours.bank, reference.bank, tolerance=1e-5)
    assert (launches["_forward"], launches["_backward"], launches["convolution"]) == (2, 2, 0)


def test_rounds_by_kernels_in_bfloat16_follow_serial():
    ours, reference = both(precision=BF16, optimizer=SGD(momentum=0.0))
    run(by_kernels(ours), ours, 3)
    run(SerialExecutor(reference), reference, 3)
    moved, expected = (tasks.bank.z.storage for tasks in (ours, reference))
    assert (moved - expected).norm() <= 0.02 * expected.norm()


def test_learner_that_is_not_finite_by_kernels_keeps_its_row_and_adds_nothing_to_z():
    tasks = make_tasks(residual, num_learners=3, data=images(), order="blocks", precision=FP32)
    bank, runner = tasks.bank, by_kernels(tasks)
    bank.weights.flat(1)[0][0] = torch.nan
    kept = [part.clone() for part in bank.weights.flat(1)]
    with np.errstate(all="ignore"):
        outcomes = run(runner, tasks, 1)
    assert outcomes[0].non_finite_learners == [1]
    now = bank.weights.flat(1)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(kept, now, strict=True))
    assert bool(bank.z.storage.isfinite().all())


def test_counters_of_batches_are_one_launch_and_count_for_every_learner():
    tasks = make_tasks(residual, num_learners=3, data=images(), order="blocks")
    run(by_kernels(tasks), tasks, 2)
    states = [tasks.bank.learner_state(learner) for learner in range(3)]
    assert [int(state["norm.num_batches_tracked"]) for state in states] == [2, 2, 2]


class Nodes(Collective):
    """Two nodes of two devices; the others add nothing to a sum and have the same z. Notes what it is given."""

    num_devices, apart = 2, True

    def __init__(self, bank):
        self.seen = []
        self._names = {getattr(bank, name).storage.data_ptr(): name for name in ("total", "z", "z_prev")}

    def all_reduce_sum(self, values):
        self.seen.append(("sum", self._names[values.data_ptr()]))

    def mean_over_nodes(self, values):
        self.seen.append(("mean", self._names[values.data_ptr()]))


@pytest.mark.parametrize("executor", [SerialExecutor, by_kernels])
def test_averaging_over_nodes_sums_moves_z_and_joins_nodes_alike_whoever_moves_z(executor):
    tasks, alone = (make_tasks(num_learners=3, order="blocks") for _ in range(2))
    tasks.collective = nodes = Nodes(tasks.bank)
    runner = executor(tasks)
    tasks.bank.total_squares = torch.ones(1)  # of an update that left the sum alone
    for n in range(2):
        runner.submit(dataclasses.replace(plan(tasks, n), joins_nodes=n == 1))
    runner.drain()
    runner.close()
    run(SerialExecutor(alone), alone, 2, rate=lambda n: 0.1)
    assert nodes.seen == [("sum", "total")] * 2 + [("mean", "z"), ("mean", "z_prev")]
    assert_learners_equal(tasks.bank, alone.bank)
    assert tasks.bank.correction_norm() == pytest.approx(alone.bank.correction_norm(), rel=1e-9)


def resnet32():
    torch.manual_seed(0)
    return MODELS["resnet32"]().build((3, 32, 32), 10)


@pytest.mark.parametrize("num_learners", [1, 2, 8])
def test_round_of_resnet32_is_at_most_200_launches_for_any_number_of_learners(num_learners):
    """Counted from the first round whose graph is captured: own kernels, and torch's operators that do work."""
    data = (torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8), torch.arange(64) % 10)
    tasks = make_tasks(resnet32, num_learners=num_learners, data=data, order="blocks", precision=FP32, kernels=True)
    with assumed("fused graph", None):
        runner = FusedExecutor(tasks, RecordingStreams(), kernels=True)
    with recorded(runs=False):
        for n in range(2):
            runner.submit(plan(tasks, n))
        with counted_launches() as launches:
            runner.submit(plan(tasks, n + 1))
        runner.drain()
    assert launches["_forward"] == launches["_backward"] == 31
    assert launches["_update"] == 1
    assert sum(launches.values()) <= 200
    assert runner.looped == []


def test_kernels_that_fail_in_the_first_round_leave_it_to_operators(monkeypatch):
    ours, reference = both()
    runner = by_kernels(ours)

    def fails(*arguments):
        raise RuntimeError("out of resource: shared memory, Required: 300000\nHardware limit: 232448")

    monkeypatch.setattr(batch_norm, "backward_inputs", fails)  # statistics have moved by then
    found = run(runner, ours, 3)
    monkeypatch.undo()
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 3))
    assert runner.notes == [
        "Kernels are not used: the first round with them failed (RuntimeError: out of "
        "resource: shared memory, Required: 300000 Hardware limit: 232448)."
    ]


def test_kernels_that_fail_later_are_a_learner_error(monkeypatch):
    tasks = make_tasks(residual, data=images(), order="blocks")
    runner = by_kernels(tasks)
    runner.submit(plan(tasks, 0))

    def fails(*arguments):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(batch_norm, "backward_inputs", fails)
    with pytest.raises(LearnerError, match="an illegal memory access"):
        runner.submit(plan(tasks, 1))


def test_filters_that_are_not_channels_last_are_left_to_operators():
    ours, reference = both(precision=FP32, channels_last=False)
    runner = by_kernels(ours)  # before counting: the first of a process compares kernels with operators
    with counted_launches() as launches:
        run(runner, ours, 1)
    run(SerialExecutor(reference), reference, 1)
    assert_learners_equal(ours.bank, reference.bank, tolerance=1e-5)
    assert (launches["_forward"], launches["_update"]) == (0, 1)
