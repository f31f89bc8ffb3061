"""Learners that stay equal, in one row on a GPU: what `serial` gives with a row each, in graphs and eagerly."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SynchronousSGD
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.on_device import WARM_UP_ROUNDS
from crossbow_py.engine.update.groups import ParameterGroup
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon
from tests.gpu.support import HAS_KERNELS, Counting, Eager, Twins, tasks_on_cuda
from tests.support import assert_equal, assert_learners_equal, norm_with_dropout, plan, poison, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("captures_work")]

ROUNDS = WARM_UP_ROUNDS + 3


def dense():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def tasks_of(**options):
    return tasks_on_cuda(**{"make_model": norm_with_dropout, "rule": SynchronousSGD(), **options})


def assert_as_a_row_each(num_rounds=ROUNDS, kind=Counting, **options):
    """Rounds of `fused` with one row are those of `serial`. Returns the executor, its device and its outcomes."""
    ours, reference = (tasks_of(one_row=one_row, **options) for one_row in (True, False))
    device = kind and kind(ours.bank.device)
    runner = FusedExecutor(ours, device)
    found, expected = run(runner, ours, num_rounds), run(SerialExecutor(reference), reference, num_rounds)
    assert_equal(ours.bank, reference.bank, found, expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.comparison == (theirs.comparison and pytest.approx(theirs.comparison, rel=1e-8))
    return runner, device, found


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (SGD(nesterov=True, clip_norm=0.3, weight_decay=1e-3), Counting),
        (AdamW(clip_norm=0.3), Eager),
        (SGD(groups=[ParameterGroup("6", rate=0.1)]), None),
    ],
    ids=["sgd in graphs", "adamw eagerly", "groups from the host"],
)
def test_one_row_trains_as_learners_with_a_row_each(optimizer, kind):
    runner, device, _ = assert_as_a_row_each(optimizer=optimizer, kind=kind)
    if kind is Counting:
        assert (device.captured, device.num_replays) == (["round"], ROUNDS - WARM_UP_ROUNDS)
        kernels = ["update", "loss", "layers"] if HAS_KERNELS else []
        assert runner.in_effect() == kernels


def test_matrices_are_orthogonalised_once():
    assert_as_a_row_each(make_model=dense, optimizer=Muon(), kind=Eager)


def test_gradients_are_compared_in_a_graph_of_their_own():
    _, device, found = assert_as_a_row_each(13, compares=True)
    assert device.captured == ["round", "round"]
    assert found[-1].comparison is not None


def test_gradients_of_two_devices_are_summed_outside_of_graphs():
    _, device, _ = assert_as_a_row_each(collective=Twins(), optimizer=AdamW(clip_norm=0.3))
    assert device.captured == ["learning", "correction"]


@pytest.mark.parametrize("poisoned", [0, WARM_UP_ROUNDS + 1], ids=["eager", "replayed"])
def test_loss_that_is_not_finite_holds_all_back_and_names_its_learner(poisoned):
    tasks = tasks_of(one_row=True, optimizer=AdamW(clip_norm=1.0), collective=Twins() if poisoned else None)
    poison(tasks, plan(tasks, poisoned).starts[1], math.inf)
    bank, runner = tasks.bank, FusedExecutor(tasks)
    for n in range(poisoned):
        runner.submit(plan(tasks, n))
    runner.drain()
    rows = [bank.weights, *bank.state.values()]
    before = [own.storage.clone() for own in rows]
    outcomes = runner.submit(plan(tasks, poisoned)) + runner.drain()
    assert all(torch.equal(own.storage, kept) for own, kept in zip(rows, before, strict=True))
    assert outcomes[0].finite == [True, False, True]
    assert bank.step_counts == [poisoned] * 3
    (after,) = runner.submit(plan(tasks, poisoned + 1)) + runner.drain()
    runner.close()
    assert after.finite[0] and bank.step_counts == [poisoned + 1] * 3
    assert bank.weights.storage.isfinite().all() and not torch.equal(bank.weights.storage, before[0])


def root_of_sum(output, _):
    """A loss of 0 at 0, where its gradient is not finite."""
    return output.square().sum().sqrt()


def test_gradient_that_is_not_finite_holds_all_back_and_leaves_learners_to_go_on_from():
    zeros = torch.zeros(64, 4), torch.zeros(64, dtype=torch.int64)
    model = partial(nn.Linear, 4, 2, bias=False)
    tasks = tasks_on_cuda(make_model=model, data=zeros, rule=SynchronousSGD(), one_row=True)
    tasks.loss = root_of_sum
    before = tasks.bank.weights.storage.clone()
    (found,) = run(FusedExecutor(tasks), tasks, 1)
    assert found.losses == [0.0] * 3 and found.finite == [False, True, True]
    assert torch.equal(tasks.bank.weights.storage, before) and tasks.bank.step_counts == [0] * 3


def test_learners_come_and_go_and_a_bank_of_cpus_goes_on_from_what_was_saved():
    ours, reference = (tasks_on_cuda(num_learners=1, rule=SynchronousSGD(), one_row=own) for own in (True, False))
    for tasks, kind in ((ours, FusedExecutor), (reference, SerialExecutor)):
        for num_learners in (1, 4, 2):
            tasks.bank.adopt_learner()
            tasks.bank.resize(num_learners)
            run(kind(tasks), tasks, WARM_UP_ROUNDS + 1)
    assert_learners_equal(ours.bank, reference.bank)
    on_cpu, again = (tasks_on_cuda(num_learners=2, rule=SynchronousSGD(), device=own) for own in ("cpu", "cuda"))
    on_cpu.bank.load_state_dict(ours.bank.state_dict())
    for tasks in (on_cpu, reference):
        run(SerialExecutor(tasks), tasks, 2)
    again.bank.load_state_dict(on_cpu.bank.state_dict())
    assert_learners_equal(again.bank, reference.bank)
