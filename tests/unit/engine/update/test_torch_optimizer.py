"""Optimizers of torch and of the user's own, by their class: against a plain loop, and what cannot train learners."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Independent, SynchronousSGD
from crossbow_py.core.errors import UserError
from crossbow_py.engine.executors import SerialExecutor
from crossbow_py.engine.modules.precision import FP32, FP64
from crossbow_py.engine.rounds import RoundOutcome
from crossbow_py.engine.sizing.memory import Job, Sample
from crossbow_py.engine.sizing.probes import estimate_learner
from crossbow_py.engine.update.device_update import DeviceUpdate, knows
from crossbow_py.engine.update.groups import ParameterGroup
from crossbow_py.engine.update.optimizers import SGD, AdamW, TorchOptimizer
from tests.support import (
    CPU,
    IMAGES,
    ON_CPU,
    assert_learners_equal,
    bank_reseeded_in_the_middle,
    linear_model,
    make_tasks,
    norm_model,
    plan,
    run_rounds,
)
from tests.unit.engine.update.test_groups import Network, factor


class SignDescent(torch.optim.Optimizer):
    """Signs of a mean of gradients, with state in its groups and new tensors in place of its parameters."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.get("mean", torch.zeros_like(parameter))
                state["mean"] = group["beta"] * mean + (1 - group["beta"]) * parameter.grad
                parameter.data = parameter.data - group["lr"] / math.sqrt(group["k"]) * state["mean"].sign()


class NoDecay(SignDescent):
    def __init__(self, params, lr=0.1, keeps=None):
        super().__init__(params, lr)
        self.keeps = keeps

    def step(self, closure=None):
        super().step()
        if self.keeps is not None:
            for state in self.state.values():
                state["kept"] = self.keeps


KINDS = [
    (torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.5, "centered": True}, 0.005),
    (torch.optim.NAdam, {"betas": (0.8, 0.99)}, 0.003),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, 0.02),
    (torch.optim.Adam, {"amsgrad": True}, 0.003),
    (torch.optim.Adafactor, {}, 0.01),
    (torch.optim.ASGD, {}, 0.05),
    (torch.optim.Rprop, {}, 0.002),
    (SignDescent, {"beta": 0.5}, 0.003),
]
# Every class in both orders of the bank; with each executor one that counts steps, and one that takes new tensors.
CASES = [
    *(("serial", order, *kind) for order in ("rows", "blocks") for kind in KINDS),
    *((*own, *kind) for own in ON_CPU[1:] for kind in KINDS if kind[0] in (torch.optim.NAdam, SignDescent)),
]


def plain_loop(target, args, rate, tasks, num_rounds, decay=0.0, make_model=Network):
    model = make_model().double()
    decayed = [own for own in model.parameters() if own.requires_grad and own.ndim > 1]
    others = [own for own in model.parameters() if own.requires_grad and own.ndim < 2]
    groups = [{"params": decayed}, {"params": others}]
    if decay:
        groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = target(groups, lr=rate, **args)
    for n in range(num_rounds):
        inputs, targets = tasks.feed.batch(n * tasks.feed.batch_size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate * factor(n)
        with torch.no_grad():
            optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("executor", "order", "target", "args", "rate"),
    CASES,
    ids=[f"{executor}-{order}-{kind.__name__}" for executor, order, kind, _, _ in CASES],
)
def test_optimizer_of_a_class_follows_a_plain_loop(executor, order, target, args, rate, two_cores):
    optimizer = TorchOptimizer(learning_rate=rate, target=target, args=args)
    tasks = make_tasks(Network, num_learners=1, rule=Independent(), optimizer=optimizer, data=IMAGES, order=order)
    run_rounds(tasks, executor, 5, rate, factor)
    expected = plain_loop(target, args, rate, tasks, 5)
    for name, value in tasks.bank.weights.shaped(0).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-8, atol=1e-9)


SGDS = (SGD(momentum=0.9, weight_decay=0.01), torch.optim.SGD, {"momentum": 0.9})
ADAMWS = (AdamW(weight_decay=0.01), torch.optim.AdamW, {})


@pytest.mark.parametrize(
    ("executor", "order", "rule", "optimizers"),
    [
        ("serial", "rows", SMA(), SGDS),
        ("serial", "rows", SynchronousSGD(), ADAMWS),
        ("fused", "blocks", SMA(), ADAMWS),
        ("fused", "blocks", SynchronousSGD(), SGDS),
        ("threads", "rows", SMA(), SGDS),
        ("threads", "rows", SynchronousSGD(), ADAMWS),
    ],
)
def test_learners_averaged_and_clipped_in_groups_are_those_of_the_packages_own_optimizers(
    executor, order, rule, optimizers, two_cores
):
    own, target, args = optimizers
    groups = (ParameterGroup("head", rate=0.5, clip_norm=0.1), ParameterGroup("features.0", weight_decay=0.2))
    theirs = TorchOptimizer(weight_decay=0.01, target=target, args=args, groups=groups, clip_norm=0.5)
    ours = replace(own, groups=groups, clip_norm=0.5)
    serial, found = (
        make_tasks(Network, num_learners=3, rule=rule, optimizer=optimizer, data=IMAGES, order=own)
        for optimizer, own in ((ours, "rows"), (theirs, order))
    )
    run_rounds(serial, "serial", 5, 0.01, factor)
    run_rounds(found, executor, 5, 0.01, factor)
    assert_learners_equal(found.bank, serial.bank)


@pytest.mark.parametrize("target", [torch.optim.NAdam, SignDescent])
def test_saved_state_goes_on_to_the_bit(target, tmp_path):
    optimizer = TorchOptimizer(target=target)
    banks = []
    for parts in ((10,), (4, 6)):
        tasks = make_tasks(norm_model, optimizer=optimizer, data=IMAGES, precision=FP32)
        first = 0
        for number in parts:
            if first:
                torch.save(tasks.bank.state_dict(), tmp_path / "bank.pt")
                tasks = make_tasks(norm_model, optimizer=optimizer, data=IMAGES, precision=FP32)
                tasks.bank.load_state_dict(torch.load(tmp_path / "bank.pt", weights_only=True))
            for index in range(first, first + number):
                for learner in range(2):
                    outcome = RoundOutcome(plan(tasks, index, 0.01))
                    tasks.learn(learner, outcome)
                    tasks.correct(learner, outcome)
                tasks.average(outcome)
            first += number
        banks.append(tasks.bank)
    assert_learners_equal(banks[1], banks[0], tolerance=0.0)


def test_reseeded_and_new_learners_begin_without_state():
    optimizer = TorchOptimizer(target=torch.optim.Adam)
    ours, own = (
        bank_reseeded_in_the_middle(SerialExecutor, make_tasks(num_learners=3, optimizer=each))
        for each in (optimizer, AdamW(weight_decay=0.0))
    )
    assert_learners_equal(ours, own)
    for bank in (ours, own):
        bank.resize(5)
    assert [len(each.tensors()) for each in ours.optimizers] == [6, 6, 6, 0, 0]
    ours.resize(2)
    assert_states_equal(ours.optimizers[0].state(), ours.state_dict()["optimizers"][0])
    ours.settle_state("reset")
    assert [len(each.tensors()) for each in ours.optimizers[:2]] == [0, 0]


def assert_states_equal(one, other):
    assert one["groups"] == other["groups"]
    for name, values in one["state"].items():
        for key, value in values.items():
            assert torch.equal(value, other["state"][name][key])


def test_memory_has_the_states_that_a_step_keeps():
    def rows(optimizer):
        job = Job(nn.functional.cross_entropy, optimizer, SMA(), FP64)
        return estimate_learner(linear_model, Sample((4,)), job).sizes.num_states

    assert [rows(TorchOptimizer(target=own)) for own in (torch.optim.RMSprop, torch.optim.Adam)] == [1, 2]
    assert rows(TorchOptimizer(target=torch.optim.Adam, args={"amsgrad": True})) == 3


@pytest.mark.parametrize(
    ("target", "args", "refusal"),
    [
        (torch.optim.LBFGS, {}, "torch.optim.lbfgs.LBFGS calls a closure several times a step"),
        ("torch.optim.SparseAdam", {}, "takes sparse gradients"),
        ("torch.nn.Linear", {}, "must be a class derived from torch.optim.Optimizer, got torch.nn.Linear"),
        ("torch.zeros", {}, "must be a class derived from torch.optim.Optimizer, got torch.zeros"),
        ("torch.optim.RMSporp", {}, "optimizer.target=torch.optim.RMSporp cannot be imported"),
        ("torch.optim.RMSprop", {"alhpa": 0.9}, "unexpected keyword argument 'alhpa'"),
        ("torch.optim.RMSprop", {"alpha": -1.0}, "Invalid alpha value: -1.0"),
        ("torch.optim.RMSprop", {"lr": 0.1}, "has lr, for which there is optimizer.learning_rate"),
        (NoDecay, {"keeps": object()}, "keeps a object, which checkpoints cannot hold"),
    ],
)
def test_class_that_cannot_step_learners_is_refused(target, args, refusal):
    with pytest.raises(UserError) as error:
        TorchOptimizer(target=target, args=args).prepared(linear_model())
    assert refusal in str(error.value)


def test_weight_decay_that_a_class_does_not_take_is_refused():
    with pytest.raises(UserError, match=r"NoDecay has no weight_decay, got one"):
        TorchOptimizer(target=NoDecay, weight_decay=0.1).prepared(linear_model())
    with pytest.raises(UserError, match=r"optimizer.target must name an optimizer, got none"):
        TorchOptimizer().prepared(linear_model())


def test_streams_refuse_an_optimizer_of_torch_by_name():
    optimizer = TorchOptimizer(target=torch.optim.RMSprop)
    assert not knows(optimizer)
    with pytest.raises(UserError, match=r"got optimizer=torch; set executor=fused or executor=serial"):
        DeviceUpdate(optimizer, SMA(), CPU)
