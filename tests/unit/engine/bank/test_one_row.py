"""Learners that stay equal in one row of the bank, against learners with a row each and one after another."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from crossbow_py.averaging import GradientMean, GroupedSMA, SynchronousSGD
from crossbow_py.engine.executors import SerialExecutor, has_one_row
from crossbow_py.engine.executors.base import even_groups
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.fused_threads import FusedThreadsExecutor
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.engine.update.groups import ParameterGroup
from crossbow_py.engine.update.optimizers import SGD, AdamW, Muon, TorchOptimizer
from tests.support import (
    assert_equal,
    assert_learners_equal,
    features,
    linear_model,
    make_tasks,
    norm_model,
    plan,
    poison,
    run,
)
from tests.thinned import thinned

K = 3
PICTURES = features(48, (3, 8, 8))


class Tokens(nn.Module):
    """An embedding with padding, two recurrent layers of either kind, and dropout of a learner's own."""

    def __init__(self, batch_first=True):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(7, 6, padding_idx=0)
        self.first = nn.GRU(6, 5, batch_first=batch_first)
        self.second = nn.LSTM(5, 4, batch_first=batch_first, bidirectional=True)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 3)
        self.dim = 1 if batch_first else 0

    def forward(self, ids):
        own = self.table(ids if self.dim else ids.t())
        found, _ = self.second(self.first(own)[0])
        return self.head(self.drop(found).mean(self.dim))


def images():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2, bias=False),
        nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6, bias=False),
        nn.BatchNorm1d(6, track_running_stats=False), nn.LayerNorm(6), nn.Linear(6, 3),
    )  # fmt: skip


class Odd(nn.Module):
    """BatchNorm of values that are not end to end in memory, a slope, masked weights, and ResNet's padded shortcut."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(2)
        self.slopes, self.plain = nn.PReLU(2), nn.BatchNorm1d(9, affine=False)
        self.head = nn.Linear(18, 3)
        self.register_buffer("mask", (torch.arange(54).reshape(3, 18) % 3 > 0).float())

    def forward(self, x):
        own = self.conv(x)
        own = self.slopes(self.norm(own.chunk(2, 1)[0][:, :, ::2]))
        own = nn.functional.pad(own[:, :, ::1, ::2], (0, 0, 0, 0, 0, 1))[:, :2]
        own = self.plain(own.flatten(2).transpose(1, 2))
        return nn.functional.linear(own.flatten(1), self.head.weight * self.mask, self.head.bias)


class InPlace(nn.Module):
    """Writes what a recurrent layer returns as a view with samples and steps turned; as many steps as K·B samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.cells, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        own = self.cells(x)[0]
        own.sigmoid_()
        return self.head(own[:, -1] + 2 * own[:, 0])


def sequences():
    targets = torch.arange(48) % 3
    return (torch.arange(48 * 5).reshape(48, 5) * 5) % 7, targets


TASKS = {
    "images": (images, lambda: PICTURES),
    "odd": (Odd, lambda: PICTURES),
    "in place": (InPlace, lambda: features(48, (12, 3))),
    "tokens": (Tokens, sequences),
    "tokens, time first": (lambda: Tokens(batch_first=False), sequences),
}


def pair(make_model=linear_model, **options):
    options = {"num_learners": K, "rule": SynchronousSGD(), "order": "blocks", **options}
    return make_tasks(make_model, one_row=True, **options), make_tasks(make_model, **options)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    thinned(itertools.product(TASKS, [SGD(nesterov=True, clip_norm=0.3), AdamW()]), quick=[0, 3, 5], slow=[2, 6]),
)
def test_one_row_trains_as_learners_with_a_row_each(name, optimizer):
    make_model, data = TASKS[name]
    ours, reference = pair(make_model, data=data(), optimizer=optimizer)
    found = run(FusedExecutor(ours), ours, 6)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 6))


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"smoothing": 0.1}, {"optimizer": Muon()}], ids=["accumulate", "smoothing", "muon"]
)
def test_one_row_takes_micro_batches_smoothed_labels_and_matrices(options):
    model = (images, PICTURES) if "optimizer" in options else (linear_model, None)
    ours, reference = pair(model[0], data=model[1], **options)
    found = run(FusedExecutor(ours), ours, 5)
    assert_equal(ours.bank, reference.bank, found, run(SerialExecutor(reference), reference, 5))


@pytest.mark.parametrize(("precision", "tolerance"), [(FP32, 1e-5), (BF16, 0.02)], ids=["fp32", "bf16"])
def test_one_row_by_native_code_is_close_to_a_row_each(precision, tolerance):
    ours, reference = pair(norm_model, data=PICTURES, precision=precision)
    run(FusedExecutor(ours), ours, 4)
    run(SerialExecutor(reference), reference, 4)
    assert_learners_equal(ours.bank, reference.bank, tolerance)


@pytest.mark.parametrize("what", ["micro-batches", "compared", "poisoned"])
def test_groups_on_threads_add_up_to_one_step(what, monkeypatch):
    monkeypatch.setattr(FusedThreadsExecutor, "groups_of", staticmethod(lambda count: even_groups(count, 2)))
    options = {"accumulate": 2, "optimizer": SGD(clip_norm=0.3)} if what == "micro-batches" else {}
    model = {} if what == "poisoned" else {"make_model": images, "data": PICTURES}
    ours, reference = pair(**model, **options, compares=what == "compared")
    for tasks in (ours, reference) if what == "poisoned" else ():
        poison(tasks, plan(tasks, 1).starts[2], math.inf)
    found, expected = run(FusedThreadsExecutor(ours), ours, 4), run(SerialExecutor(reference), reference, 4)
    assert_learners_equal(ours.bank, reference.bank)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-8, nan_ok=True) and mine.finite == theirs.finite
        assert mine.comparison == (theirs.comparison and pytest.approx(theirs.comparison, rel=1e-9))
    assert (found[1].finite == [True, True, False]) is (what == "poisoned")
    assert (found[0].comparison is not None) is (what == "compared")


def test_weights_gradients_and_state_are_there_once_and_buffers_for_each():
    ours, alone = pair(images, optimizer=AdamW())[0].bank, pair(images, optimizer=AdamW(), num_learners=1)[1].bank
    for own, one in zip(rows_of(ours), rows_of(alone), strict=True):
        assert own.storage.nbytes == one.storage.nbytes
    weights = [ours.module(learner)[0].weight.data_ptr() for learner in range(K)]
    assert len(set(weights)) == 1
    assert len({ours.module(learner)[1].running_mean.data_ptr() for learner in range(K)}) == K


def rows_of(bank):
    return [bank.weights, bank.gradients, bank.corrections, *bank.state.values()]


def test_gradients_of_learners_are_compared_one_by_one():
    ours, reference = pair(images, data=PICTURES, compares=True)
    found, expected = run(FusedExecutor(ours), ours, 2), run(SerialExecutor(reference), reference, 2)
    assert expected[0].comparison is not None
    assert found[0].comparison == pytest.approx(expected[0].comparison, rel=1e-9)
    assert_equal(ours.bank, reference.bank, found, expected)  # buffers have moved once


@pytest.mark.parametrize("one_row", [FusedExecutor, FusedThreadsExecutor])
def test_learners_come_and_go_with_the_momentum_that_all_have(one_row):
    ours, reference = pair(images, data=PICTURES)
    for tasks, kind in ((ours, one_row), (reference, SerialExecutor)):
        for num_learners in (K, 5, 1, 2):
            tasks.bank.adopt_learner()
            tasks.bank.resize(num_learners)
            run(kind(tasks), tasks, 2)
    assert_learners_equal(ours.bank, reference.bank, 1e-10)
    assert ours.bank.step_counts[:2] == reference.bank.step_counts[:2]


def test_checkpoint_has_one_row_and_opens_in_a_bank_of_either_kind():
    ours, reference = pair(images, data=PICTURES)
    run(FusedExecutor(ours), ours, 3)
    saved = ours.bank.state_dict()
    assert all(own.stride(0) == 0 and len(own) == K for own in saved["weights"].values())
    reference.bank.load_state_dict(saved)
    assert_learners_equal(ours.bank, reference.bank, 0)
    other = pair(images, data=PICTURES)[0]
    other.bank.load_state_dict(reference.bank.state_dict())
    found, expected = run(FusedExecutor(other), other, 2), run(SerialExecutor(reference), reference, 2)
    assert_equal(other.bank, reference.bank, found, expected)


@pytest.mark.parametrize("kind", [FusedExecutor, FusedThreadsExecutor])
def test_loss_that_is_not_finite_stops_a_learner_that_is_alone(kind):
    data = (torch.full((64, 4), math.inf), torch.zeros(64, dtype=torch.int64))
    ours, reference = pair(num_learners=1, data=data)
    before = ours.bank.weights.storage.clone()
    (found,), (expected,) = run(kind(ours), ours, 1), run(SerialExecutor(reference), reference, 1)
    assert found.finite == expected.finite == [False]
    assert torch.equal(ours.bank.weights.storage, before) and ours.bank.step_counts == [0]


@pytest.mark.parametrize(
    ("name", "optimizer", "mean", "expected"),
    [
        ("fused", SGD(), GradientMean(), True),
        ("fused", SGD(), SynchronousSGD().gradient_mean, True),
        ("fused_threads", SGD(), GradientMean(), True),
        ("threads", SGD(), GradientMean(), False),
        ("streams", SGD(), GradientMean(), False),
        ("fused", SGD(), GroupedSMA(group_size=2).gradient_mean, False),
        ("fused", SGD(), None, False),
        ("fused", SGD(groups=[ParameterGroup("0", clip_norm=1.0)]), GradientMean(), False),
        ("fused", TorchOptimizer(target="torch.optim.RMSprop"), GradientMean(), False),
        ("auto", SGD(), GradientMean(), False),
    ],
)  # fmt: skip
def test_learners_are_one_row_only_where_they_cannot_part(name, optimizer, mean, expected):
    assert has_one_row(name, optimizer, mean) is expected


def test_round_of_one_row_has_one_step_whatever_the_number_of_learners():
    ours = pair(images, data=PICTURES)[0]
    seen = []
    ours.update.correct = lambda learner, *rest: seen.append(learner)
    executor = FusedExecutor(ours)
    executor.submit(plan(ours, 0))
    assert seen == [0]
