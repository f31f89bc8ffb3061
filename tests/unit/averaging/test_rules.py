"""Every rule against its equations, written out in NumPy and float64 for softmax regression."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from crossbow_py.averaging import (
    PAPA,
    RULES,
    SMA,
    SNOO,
    AveragingRule,
    Crossbow,
    DiLoCo,
    Elastic,
    GroupedSMA,
    Independent,
    LinearRound,
    LocalSGD,
    OuterStep,
    SlowMo,
    Stage,
    SynchronousSGD,
)
from crossbow_py.cli.configuration import compose
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import from_mapping
from crossbow_py.engine.bank.replicas import ReplicaBank
from crossbow_py.engine.update.optimizers import SGD
from crossbow_py.train.config import TrainConfig
from tests.support import linear_model, make_tasks, run_rounds
from tests.thinned import thinned

Vector = NDArray[np.float64]
ROUNDS, LEARNERS, RATE, MOMENTUM, DECAY = 50, 3, 0.3, 0.8, 0.01


def factor(index: int) -> float:
    """A cosine over the rounds, not quite to zero."""
    return 0.01 + 0.99 * (1 + math.cos(math.pi * index / ROUNDS)) / 2


class Reference:
    """K learners, z and whatever else a rule keeps, as flat vectors: 15 weights, which decay, and 3 biases."""

    def __init__(self, feed: Any, learners: int = LEARNERS) -> None:
        model = linear_model()
        self.shape = model.weight.shape
        flat = [model.weight.detach().double().numpy().ravel(), model.bias.detach().double().numpy()]
        self.z: Vector = np.concatenate(flat)
        self.z_prev = self.z.copy()
        self.w: Vector = np.stack([self.z] * learners)
        self.u, self.m = np.zeros_like(self.w), np.zeros_like(self.z)
        self.decay = np.concatenate([np.full(flat[0].size, DECAY), np.zeros(flat[1].size)])
        self.feed = feed

    def gradients(self, index: int) -> Vector:
        learners = len(self.w)
        return np.stack([self._gradient(j, (index * learners + j) * 4) for j in range(learners)])

    def _gradient(self, j: int, start: int) -> Vector:
        inputs, targets = self.feed.batch(start)
        x, y = inputs.numpy(), targets.numpy()
        weight, bias = np.split(self.w[j], [self.shape.numel()])
        logits = x @ weight.reshape(self.shape).T + bias
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        return np.concatenate([(p.T @ x / len(y)).ravel(), p.sum(0) / len(y)])

    def step(self, index: int) -> Vector:
        """The learners' steps: what is taken from w."""
        self.u = MOMENTUM * self.u + self.gradients(index) + self.decay * self.w
        return RATE * factor(index) * self.u


def sma(r: Reference, n: int, alpha: float = 1.0, period: int = 1) -> None:
    pull = alpha * (r.w - r.z) if n % period == 0 else 0
    r.w = r.w - r.step(n) - pull
    if (n + 1) % period == 0:
        r.z = r.w.mean(0)


def crossbow(r: Reference, n: int, alpha: float, mu: float, period: int = 1) -> None:
    step = r.step(n)
    if (n + 1) % period:
        r.w = r.w - step
        return
    c = alpha * (r.w - r.z)
    r.w = r.w - step - c
    r.z, r.z_prev = r.z + c.sum(0) + mu * (r.z - r.z_prev), r.z


def local_sgd(r: Reference, n: int, period: int) -> None:
    r.w = r.w - r.step(n)
    if (n + 1) % period == 0:
        r.z = r.w.mean(0)
        r.w = np.broadcast_to(r.z, r.w.shape)


def diloco(r: Reference, n: int, period: int, eta: float, beta: float) -> None:
    r.w = r.w - r.step(n)
    if (n + 1) % period == 0:
        delta = r.z - r.w.mean(0)
        r.m = beta * r.m + delta
        r.z = r.z - eta * (delta + beta * r.m)
        r.w = np.broadcast_to(r.z, r.w.shape)


def snoo(r: Reference, n: int, period: int, eta: float, beta: float) -> None:
    z = r.z
    synchronous_sgd(r, n)
    r.z = z
    if (n + 1) % period == 0:
        delta = z - r.w[0]
        r.m = beta * r.m + delta
        r.z = z - eta * (delta + beta * r.m)
        r.w = np.broadcast_to(r.z, r.w.shape)


def slowmo(r: Reference, n: int, period: int, a: float, beta: float) -> None:
    r.w = r.w - r.step(n)
    if (n + 1) % period == 0:
        gamma = RATE * factor(n)
        r.m = beta * r.m + (r.z - r.w.mean(0)) / gamma
        r.z = r.z - a * gamma * r.m
        r.w = np.broadcast_to(r.z, r.w.shape)


def synchronous_sgd(r: Reference, n: int) -> None:
    gradient = r.gradients(n).mean(0)
    r.u = MOMENTUM * r.u + gradient + r.decay * r.w
    r.w = r.w - RATE * factor(n) * r.u
    r.z = r.w[0]


def grouped_sma(r: Reference, n: int) -> None:
    """Three learners in groups of at most two: {0} and {1, 2}, the gradient of the first its own."""
    g = r.gradients(n)
    g = np.stack([g[0], (g[1] + g[2]) / 2, (g[1] + g[2]) / 2])
    r.u = MOMENTUM * r.u + g + r.decay * r.w
    r.w = r.w - RATE * factor(n) * r.u - (r.w - r.z)
    r.z = r.w.mean(0)


def crossbow_towards(r: Reference, n: int, final: float) -> None:
    alpha = 1 / 3 + (final - 1 / 3) * (1 - math.ceil(16 * factor(n)) / 16)
    step, c = r.step(n), alpha * (r.w - r.z)
    r.w = r.w - step - c
    r.z, r.z_prev = r.z + min(1, 1 / (3 * alpha)) * c.sum(0) + 0.9 * (r.z - r.z_prev), r.z


def papa(r: Reference, n: int, period: int, pull: float) -> None:
    r.w = r.w - r.step(n)
    if (n + 1) % period == 0:
        r.z = r.w.mean(0)
        share = pull * factor(n)
        r.w = (1 - share) * r.w + share * r.z


CASES: dict[str, tuple[AveragingRule, Callable[[Reference, int], None]]] = {
    "sma": (SMA(), sma),
    "sma with a small pull": (SMA(correction_rate=0.2), lambda r, n: sma(r, n, 0.2)),
    "sma with a period": (SMA(correction_rate=0.7, averaging_period=4), lambda r, n: sma(r, n, 0.7, 4)),
    "crossbow": (Crossbow(), lambda r, n: crossbow(r, n, 0.1, 0.9)),
    "crossbow with a period": (
        Crossbow(correction_rate=None, averaging_period=4),
        lambda r, n: crossbow(r, n, 1 / LEARNERS, 0.9, 4),
    ),
    "crossbow with a correction rate that grows": (
        Crossbow(correction_rate=None, final_correction_rate=0.9),
        lambda r, n: crossbow_towards(r, n, 0.9),
    ),
    "grouped_sma": (GroupedSMA(group_size=2), grouped_sma),
    "grouped_sma in one group": (GroupedSMA(group_size=3), synchronous_sgd),
    "grouped_sma in groups of one": (GroupedSMA(group_size=1), sma),
    "elastic": (Elastic(), lambda r, n: crossbow(r, n, 0.9 / LEARNERS, 0.0)),
    "elastic with a period": (
        Elastic(correction_rate=0.1, averaging_period=3),
        lambda r, n: crossbow(r, n, 0.1, 0.0, 3),
    ),
    "local_sgd": (LocalSGD(averaging_period=5), lambda r, n: local_sgd(r, n, 5)),
    "diloco": (DiLoCo(averaging_period=5), lambda r, n: diloco(r, n, 5, 0.7, 0.9)),
    "diloco every round": (
        DiLoCo(averaging_period=1, outer_learning_rate=0.5, outer_momentum=0.6),
        lambda r, n: diloco(r, n, 1, 0.5, 0.6),
    ),
    "snoo": (SNOO(averaging_period=5), lambda r, n: snoo(r, n, 5, 0.7, 0.9)),
    "slowmo": (SlowMo(averaging_period=4), lambda r, n: slowmo(r, n, 4, 1.0, 0.7)),
    "synchronous_sgd": (SynchronousSGD(), synchronous_sgd),
    "papa": (PAPA(averaging_period=3, pull=0.25), lambda r, n: papa(r, n, 3, 0.25)),
}


EXECUTORS = ["serial", "threads", "fused", "fused_threads"]


@pytest.mark.parametrize(
    ("case", "executor"),  # by turns; every executor equals serial in tests of its own
    thinned(
        itertools.product(CASES, EXECUTORS),
        quick=[4 * place + place % 4 for place in range(len(CASES))],
        slow=[4 * place + (place + 2) % 4 for place in range(len(CASES))],
    ),
)
def test_rule_after_fifty_rounds_is_what_its_equations_give(case: str, executor: str) -> None:
    rule, follow = CASES[case]
    tasks = make_tasks(num_learners=LEARNERS, optimizer=SGD(momentum=MOMENTUM, weight_decay=DECAY), rule=rule)
    run_rounds(tasks, executor, ROUNDS, RATE, factor)
    reference = Reference(tasks.feed)
    for index in range(ROUNDS):
        follow(reference, index)
    tasks.bank.adopt_learner()
    compare(tasks.bank, reference)


def compare(bank: ReplicaBank, reference: Reference) -> None:
    z, stacked = bank.z.shaped(), bank.stacked()
    found = np.concatenate([z["weight"].numpy().ravel(), z["bias"].numpy()])
    assert np.linalg.norm(found - reference.z) <= 1e-8 * np.linalg.norm(reference.z)
    w = np.concatenate([stacked["weight"].numpy().reshape(len(reference.w), -1), stacked["bias"].numpy()], 1)
    assert np.linalg.norm(w - reference.w) <= 1e-8 * np.linalg.norm(reference.w)


OF_ONE: dict[str, tuple[AveragingRule, Callable[[Reference, int], None]]] = {
    "snoo": (SNOO(averaging_period=4), lambda r, n: snoo(r, n, 4, 0.7, 0.9)),
    "diloco": (DiLoCo(averaging_period=4), lambda r, n: snoo(r, n, 4, 0.7, 0.9)),
    "slowmo": (SlowMo(averaging_period=4), lambda r, n: slowmo(r, n, 4, 1.0, 0.7)),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", OF_ONE)
def test_a_single_learner_takes_outer_steps_by_their_equations(case: str, executor: str) -> None:
    rule, follow = OF_ONE[case]
    tasks = make_tasks(num_learners=1, optimizer=SGD(momentum=MOMENTUM, weight_decay=DECAY), rule=rule)
    run_rounds(tasks, executor, ROUNDS, RATE, factor)
    reference = Reference(tasks.feed, 1)
    for index in range(ROUNDS):
        follow(reference, index)
    tasks.bank.adopt_learner()
    compare(tasks.bank, reference)


def test_every_rule_is_among_the_cases_or_averages_nothing() -> None:
    covered = {type(rule) for rule, _ in CASES.values()}
    assert set(RULES.values()) - covered == {Independent}


@pytest.mark.parametrize("rule", [kind() for kind in RULES.values()], ids=list(RULES))
def test_one_learner_averages_nothing_without_an_outer_momentum_nor_do_independent_ones(rule: AveragingRule) -> None:
    if rule.has_velocity:
        assert type(rule).NAME in OF_ONE
        return
    learners = 4 if isinstance(rule, Independent) else 1
    assert all(rule.round(Stage(index, learners)) is None for index in range(100))


def test_quadratic_rule_averages_less_often_as_the_rate_falls() -> None:
    rule = LocalSGD(averaging_period=2, quadratic_period=0.4)
    # (0.4 / 0.2)² = 4 rounds; at 0.1 they are 16; at 0.8 the least, 2.
    for rate, period in ((0.2, 4), (0.1, 16), (0.8, 2)):
        stages = {apart: Stage(7, 4, 0.01, rounds_apart=apart, first_rate=rate) for apart in range(1, 20)}
        assert [apart for apart, stage in stages.items() if rule.round(stage)] == list(range(period, 20))
    assert rule.round(Stage(7, 4, rounds_apart=10**6, first_rate=0.0)) is None  # at rest there is nothing to average
    assert rule.linear_round(4) is None
    pulls = SMA(quadratic_period=0.4, averaging_period=2)
    assert pulls.linear_round(4) == LinearRound(0.0, share=0.25, follows_learners=True)
    assert pulls.round(Stage(3, 4, rounds_apart=1, first_rate=0.1)) == LinearRound(
        1.0, share=0.25, follows_learners=True, moves_z=False
    )
    # At the end z is brought to where learners are; the mean of learners that take outer steps is there in any case.
    last = Stage(7, 4, rounds_apart=3, first_rate=0.0, is_last=True)
    assert (pulls.round(last), rule.round(last)) == (pulls.linear_round(4), None)


@pytest.mark.parametrize("rule", [SlowMo(averaging_period=1), DiLoCo(averaging_period=1), SNOO(averaging_period=1)])
def test_outer_momentum_at_no_learning_rate_moves_z_no_further(rule: AveragingRule) -> None:
    for count in (1, 2):
        assert rule.round(Stage(0, count, learning_rate=0.0, factor=0.0)) == OuterStep()


def test_population_stays_apart_at_no_learning_rate() -> None:
    assert PAPA(averaging_period=1).round(Stage(0, 2, learning_rate=0.0, factor=0.0)) == OuterStep(pull=0.0)


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1.0), ("sqrt", 4.0), ("linear", 16.0)])
def test_learning_rate_is_scaled_with_the_number_of_learners(scaling: Any, expected: float) -> None:
    assert SMA(rate_scaling=scaling).rate_scale(16) == expected
    assert GroupedSMA(group_size=4, rate_scaling=scaling).rate_scale(16) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("sma", 2.0), ("grouped_sma", 2.0), ("crossbow", 1.0), ("elastic", 1.0)]
)
def test_learning_rate_of_four_learners_is_doubled_by_sma_unless_told_otherwise(name: str, expected: float) -> None:
    assert compose([f"averaging={name}"], TrainConfig).averaging.rate_scale(4) == expected


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (SMA, {"correction_rate": 1.5}, r"averaging\.correction_rate must be at most 1, got 1.5: replicas would"),
        (Crossbow, {"averaging_momentum": 1.0}, r"averaging\.averaging_momentum must be less than 1, got 1.0: a step"),
        (SMA, {"correction_rate": 0.0}, r"averaging\.correction_rate must be greater than 0"),
        (SMA, {"averaging_period": 0}, r"averaging\.averaging_period must be at least 1, got 0"),
        (SMA, {"node_period": 0}, r"averaging\.node_period must be at least 1, got 0"),
        (SMA, {"node_period": 2, "quadratic_period": 0.1}, r"averaging\.node_period and averaging"),
        (DiLoCo, {"outer_momentum": 1.0}, r"averaging\.outer_momentum must be less than 1"),
        (SlowMo, {"slow_learning_rate": 0.0}, r"averaging\.slow_learning_rate must be greater than 0"),
        (PAPA, {"pull": 2.0}, r"averaging\.pull must be at most 1"),
        (LocalSGD, {"quadratic_period": 0.0}, r"averaging\.quadratic_period must be greater than 0"),
    ],
)
def test_settings_outside_their_limits_are_refused(kind: type[AveragingRule], options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        kind(**options)


@pytest.mark.parametrize(
    ("rule", "key", "said"),
    [
        ("synchronous_sgd", "averaging_period", "gradients are averaged in every round, or learners would part"),
        ("synchronous_sgd", "correction_rate", "learners stay equal"),
        ("local_sgd", "correction_rate", "learners train alone"),
        ("independent", "averaging_momentum", "its learners are never averaged"),
    ],
)
def test_settings_that_a_rule_cannot_have_are_refused_with_the_reason(rule: str, key: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"averaging\.{key} means nothing to averaging={rule}: {said}.*; leave it out"):
        from_mapping(RULES[rule], {key: 1}, "averaging")


def test_every_setting_of_a_rule_is_one_of_another_or_lacked_with_a_reason() -> None:
    own = {rule: {field.name for field in fields(rule)} for rule in RULES.values()}
    # Names of one rule's own parameters, which nobody looks for at another that has no outer steps.
    particular = {"outer_learning_rate", "outer_momentum", "slow_learning_rate", "slow_momentum", "pull"}
    for rule in RULES.values():
        assert rule.LACKS.keys() <= set().union(*own.values()) - own[rule]
        others = set().union(*own.values()) - own[rule] - particular
        assert others <= rule.LACKS.keys(), rule


def test_rules_whose_restarts_and_nodes_groups_decide() -> None:
    rule = GroupedSMA(group_size=4)
    assert [rule.restarts(k, 1) for k in (1, 4, 8)] == [False, False, True]
    assert rule.restarts(4, 2)
    assert not SynchronousSGD().restarts(4, 1)
    with pytest.raises(UserError, match="averaging.node_period must be 1 where all learners"):
        GroupedSMA(node_period=2)
