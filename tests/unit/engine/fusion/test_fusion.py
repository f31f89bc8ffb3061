"""The fused executor on whole networks: what serial gives, without a loop over learners; and models it cannot run."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from crossbow_py.averaging import SMA, Independent
from crossbow_py.core.errors import LearnerError, UnknownIdError
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.fusion.fused_pass import PassNotes
from crossbow_py.engine.fusion.rules import layers
from crossbow_py.engine.fusion.rules.registry import RULES
from crossbow_py.engine.fusion.values import Fused
from crossbow_py.engine.fusion.writes import FusionError
from crossbow_py.engine.modules.precision import BF16, FP32
from crossbow_py.models import MODELS
from tests import networks
from tests.support import assert_learners_equal, features, make_tasks, plan

ZOO = {
    "mlp": (1, 28, 28),
    "lenet": (1, 28, 28),
    "resnet20": (3, 16, 16),
    **{f"resnet{depth}": (3, 32, 32) for depth in (32, 44, 56, 110)},
    "vgg16": (3, 32, 32),
}
LOOPED = {networks.LstmClassifier: ["lstm"]}  # the one operator here without a rule
SHALLOW, DEEPEST = ["mlp", "lenet", "resnet20"], ["resnet44", "resnet56", "resnet110", "vgg16"]


def deep(names):
    """Parameters of tests that take minutes for the larger models."""
    marks = {name: [pytest.mark.slow, *([pytest.mark.long] if name in DEEPEST else [])] for name in names}
    return [name if name in SHALLOW else pytest.param(name, marks=marks[name]) for name in names]


class Result:
    """What some rounds of one executor leave behind."""

    def __init__(self, tasks, executor, num_rounds, shared):
        runner = EXECUTORS[executor](tasks)
        outcomes = []
        for n in range(num_rounds):
            whole = plan(tasks, n, 0.05)
            if shared:
                whole = dataclasses.replace(whole, starts=whole.starts[:1] * len(whole.starts))
            outcomes += runner.submit(whole)
        outcomes += runner.drain()
        runner.close()
        self.looped = getattr(runner, "looped", None)
        self.losses = [outcome.losses for outcome in outcomes]
        self.num_correct = [outcome.num_correct for outcome in outcomes]
        self.bank = tasks.bank


def run(executor, make_model, data, *, num_rounds=20, rule=None, shared=False, **options):
    """Three learners with weights of their own where the rule allows it."""
    rule = rule or SMA()
    together = rule.has_central_model
    tasks = make_tasks(
        make_model, num_learners=3, data=data, rule=rule, order="blocks", shares_base=together, **options
    )
    if not rule.has_central_model:
        for learner in range(3):
            torch.manual_seed(5 + learner)
            tasks.bank.load_learner(learner, make_model(seed=None))
    return Result(tasks, executor, num_rounds, shared)


def assert_equal(ours, reference, tolerance):
    assert_learners_equal(ours.bank, reference.bank, tolerance)


def maker(network):
    def make(seed=1):
        if seed is not None:
            torch.manual_seed(seed)
        return network()

    return make


def zoo_model(name):
    return maker(lambda: MODELS[name]().build(ZOO[name], 10))


@pytest.mark.slow
@pytest.mark.parametrize("network", networks.NETWORKS)
@pytest.mark.parametrize("rule", [SMA(), Independent()], ids=["sma", "independent"])
def test_fused_after_twenty_rounds_in_float64_equals_serial(network, rule):
    shared = isinstance(rule, Independent)  # an ensemble: all learners on one stream of batches
    serial, fused = (
        run(executor, maker(network), networks.inputs_for(network), rule=rule, shared=shared)
        for executor in ("serial", "fused")
    )
    assert_equal(fused, serial, 1e-8)
    assert torch.tensor(fused.losses) == pytest.approx(torch.tensor(serial.losses), rel=1e-8)
    assert fused.num_correct == serial.num_correct
    assert sorted(set(fused.looped)) == LOOPED.get(network, [])


@pytest.mark.slow
@pytest.mark.parametrize("name", deep(ZOO))
def test_fused_zoo_model_after_five_rounds_in_float64_equals_serial_and_loops_over_nothing(name):
    data = features(48, ZOO[name], 10)
    serial, fused = (run(executor, zoo_model(name), data, num_rounds=5) for executor in ("serial", "fused"))
    assert_equal(fused, serial, 1e-8)
    assert fused.looped == []


@pytest.mark.slow
@pytest.mark.parametrize("network", [networks.SqueezeExcite, networks.Transformer, networks.UNet])
def test_fused_in_bf16_follows_serial_in_bf16(network):
    fp32, serial, fused = (
        run(executor, maker(network), networks.inputs_for(network), num_rounds=3, precision=precision)
        for executor, precision in (("serial", FP32), ("serial", BF16), ("fused", BF16))
    )
    assert sorted(set(fused.looped)) == []
    for ours, rounded, exact in zip(fused.losses, serial.losses, fp32.losses, strict=True):
        assert ours == pytest.approx(rounded, rel=0.05)
        assert ours != exact


class Takes(nn.Module):
    """A linear layer, taken by a function of the module and its inputs."""

    def __init__(self, take):
        super().__init__()
        self.linear, self.take = nn.Linear(4, 3), take

    def forward(self, x):
        return self.take(self, x)


class WritesThroughAView(Takes):
    def forward(self, x):
        y = self.linear(x)
        y[:, 0].mul_(2)
        return y


def writes_without_gradient(m, x):
    y = m.linear(x)
    with torch.no_grad():
        y.mul_(2)
    return y


def inference_mode(m, x):
    with torch.inference_mode():
        fixed = m.linear(x)
    return m.linear(x) * fixed.clone()


@pytest.mark.parametrize(
    ("take", "reason"),
    [
        (lambda m, x: m.linear(x) * random.random(), "it draws random numbers from Python's or numpy's generator"),
        (lambda m, x: m.linear(x) * np.random.rand(), "it draws random numbers from Python's or numpy's generator"),
        (
            lambda m, x: m.linear(x) if x.sum() > 0 else m.linear(-x),
            r"torch.export cannot capture it \(Python asks for the value of a tensor\) in test_fusion.py, line \d+: "
            r"lambda m, x: m.linear\(x\) if x.sum\(\) > 0",
        ),
        (
            lambda m, x: (y := m.linear(x)) + y[y > 0].sum(),
            r"a shape depends on values \(index\), and learners .* in test_fusion.py, line \d+: ",
        ),
        (writes_without_gradient, r"it writes under torch.no_grad what was computed outside of it \(aten.mul_"),
        (
            inference_mode,
            r"it computes under torch.inference_mode, which torch.export loses; use torch.no_grad in test_fusion.py, "
            r"line \d+: ",
        ),
        (lambda m, x: (m.linear(x), x), "the model itself fails on its first samples.*not tuple"),
        (WritesThroughAView, r"it writes through a view \(mul_\) in test_fusion.py, line \d+: y\[:, 0\].mul_\(2\)$"),
        (
            lambda m, x: m.linear(x) * float(m.linear.weight.norm()),
            "torch.export cannot capture it|it makes a number of a tensor",
        ),
    ],
)
def test_model_that_cannot_be_fused_is_refused_in_one_line(take, reason, capfd):
    with pytest.raises(FusionError, match=reason) as refused:
        EXECUTORS["fused"](make_tasks(lambda: (take if isinstance(take, type) else Takes)(take), order="blocks"))
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def no_rule(call, args, kwargs):
    return {}["missing"]


def other_numbers(call, args, kwargs):
    found = layers.linear(call, args, kwargs)
    return Fused(found.tensor * 1.01, found.layout)


def other_shape(call, args, kwargs):
    found = layers.linear(call, args, kwargs)
    return Fused(found.tensor[..., :1], found.layout)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (no_rule, r"the rule of linear fails \(KeyError: 'missing'\) in "),
        (other_numbers, r"its graph gives other numbers than the model itself \("),
    ],
)
def test_rule_that_is_at_fault_has_its_model_refused(rule, reason, monkeypatch):
    monkeypatch.setitem(RULES, "linear", rule)
    with pytest.raises(FusionError, match=reason):
        EXECUTORS["fused"](make_tasks(networks.Net, order="blocks"))


def test_result_of_another_shape_is_replaced_by_the_loop(monkeypatch):
    monkeypatch.setitem(RULES, "linear", other_shape)
    runner = EXECUTORS["fused"](tasks := make_tasks(networks.Net, order="blocks"))
    runner.submit(plan(tasks, 0))
    runner.drain()
    runner.close()
    assert runner.notes == ["Operators run learner by learner, for want of a rule that fuses them: linear."]


def test_fused_round_that_fails_says_which_and_why():
    def fail(output, target):
        raise ValueError("boom")

    tasks = make_tasks(order="blocks")
    runner = EXECUTORS["fused"](tasks)
    tasks.loss = fail
    with pytest.raises(LearnerError, match="round failed in round 0 on all learners: ValueError: boom"):
        runner.submit(plan(tasks, 0))
    runner.close()


@pytest.mark.parametrize("executor", ["fused", "fused_threads"])
def test_looped_operators_are_named_once_in_a_note(executor, two_cores):
    network = networks.LstmClassifier
    tasks = make_tasks(maker(network), num_learners=3, data=networks.inputs_for(network), order="blocks")
    runner, said = EXECUTORS[executor](tasks), []
    for n in range(4):
        runner.submit(plan(tasks, n))
        said += runner.notes
        runner.notes.clear()  # as who tells them does
    runner.drain()
    runner.close()
    said += runner.notes
    assert said == ["Operators run learner by learner, for want of a rule that fuses them: lstm."]


def test_notes_of_groups_are_told_once_and_not_once_a_group(two_cores):
    tasks = make_tasks(num_learners=3, order="blocks")
    runner = EXECUTORS["fused_threads"](tasks)
    assert len(runner._passes) == 2
    for n in range(4):
        for fused in runner._passes:
            fused.notes += ["Something is slow."] if n < 2 else []
        runner.submit(plan(tasks, n))
        runner.drain()
    runner.close()
    assert runner.notes == ["Something is slow."]


def test_operators_that_only_some_groups_loop_over_are_named_together():
    notes = PassNotes()
    for looped in (["sort", "lstm", "lstm"], [], ["gru", "lstm"]):
        notes.read(SimpleNamespace(notes=[], graph=SimpleNamespace(looped=looped)))
    assert notes.take() == ["Operators run learner by learner, for want of a rule that fuses them: gru, lstm, sort."]
    assert notes.take() == []


def test_rows_of_banks_in_either_order_serve_fused_rounds():
    results = []
    for order in ("rows", "blocks"):
        network = networks.SqueezeExcite
        tasks = make_tasks(maker(network), data=networks.inputs_for(network), order=order)
        results.append(Result(tasks, "fused", 6, shared=False))
    assert_equal(*results, 1e-10)


def test_index_beyond_an_embedding_is_an_error_and_not_the_neighbours_row():
    network = networks.HandAttention
    inputs, targets = networks.inputs_for(network)
    inputs[40, 3] = 11
    tasks = make_tasks(maker(network), data=(inputs, targets), order="blocks")
    runner = EXECUTORS["fused"](tasks)
    with pytest.raises(UnknownIdError, match="looks up id 11 in a table of 11 rows"):
        for n in range(6):
            runner.submit(plan(tasks, n))
    runner.close()


def test_loss_of_one_value_in_a_vector_serves_as_in_serial():
    def loss(output, target):
        return nn.functional.cross_entropy(output, target).reshape(1)

    results = []
    for executor in ("serial", "fused"):
        tasks = make_tasks(order="blocks")
        tasks.loss = loss
        results.append(Result(tasks, executor, 3, shared=False))
    assert_equal(results[1], results[0], 1e-10)
