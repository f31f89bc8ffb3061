"""The gradient noise scale and what follows from it: by hand, by sampling, and from the gradients of real rounds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from crossbow_py.averaging import SMA, AveragingRule, Crossbow, GroupedSMA, SynchronousSGD
from crossbow_py.data.feed import Batch
from crossbow_py.engine.executors import EXECUTORS
from crossbow_py.engine.executors.fused import FusedExecutor
from crossbow_py.engine.executors.streams import StreamsExecutor
from crossbow_py.engine.goodput import Comparison, NoiseScale, compares_in, efficiency
from crossbow_py.engine.modules.precision import FP32, FP64, Precision
from crossbow_py.engine.rounds import RoundTasks
from crossbow_py.engine.update.optimizers import SGD, Muon, Optimizer
from tests.recording_streams import ShuffledStreams
from tests.support import IMAGES, features, make_tasks, norm_model, norm_with_dropout, run
from tests.thinned import pairs
from tests.unit.engine.update.test_muon import small_model

# Gradients (3, 0) and (1, 0): s = 5, q = 4.
BY_HAND = Comparison(5.0, 4.0, 2)


def known(scale: float, batch_size: int = 32) -> NoiseScale:
    return NoiseScale(batch_size, variance=scale, squared_gradient=1.0, count=100)


def test_two_gradients_by_hand() -> None:
    found = NoiseScale(10).after([BY_HAND] * 16)
    assert (found.squared_gradient, found.variance) == pytest.approx((3.0, 20.0))
    assert found.samples == pytest.approx(20 / 3)
    assert found.efficiency(2) == pytest.approx((20 / 3 + 10) / (20 / 3 + 20))
    assert found.gain(2) == pytest.approx(1.25)


def test_little_is_not_enough_and_what_is_not_finite_tells_nothing() -> None:
    few = NoiseScale(10).after([BY_HAND] * 15)
    assert (few.samples, few.efficiency(4), few.gain(4)) == (None, None, 1.0)
    bad = [Comparison(math.nan, 1.0, 2), Comparison(1.0, math.inf, 2), Comparison(1.0, 1.0, 1)]
    assert few.after(bad) == few
    assert few.after([*bad, BY_HAND]).samples == pytest.approx(20 / 3)


@pytest.mark.parametrize(
    ("found", "scale", "gain"),
    [
        (Comparison(4.0, 4.0, 2), 0.0, 1.0),  # no noise: a larger batch is no better
        (Comparison(3.9, 4.0, 2), 0.0, 1.0),  # rounding
        (Comparison(5.0, 2.0, 2), math.inf, 4.0),  # the mean is shorter than noise alone would have it
        (Comparison(0.0, 0.0, 2), 0.0, 1.0),
    ],
)
def test_without_noise_or_with_nothing_else(found: Comparison, scale: float, gain: float) -> None:
    noise = NoiseScale(8).after([found] * 20)
    assert (noise.samples, noise.gain(4)) == (scale, gain)


def test_estimates_are_unbiased_and_their_mean_follows_what_changes() -> None:
    generator = np.random.default_rng(0)
    noise, k, b, mean, deviation = NoiseScale(16), 4, 16, 0.3, 2.0
    for _ in range(400):
        gradients = mean + generator.normal(0, deviation / math.sqrt(b), (k, 50))
        s, q = (gradients**2).sum(1).mean(), (gradients.mean(0) ** 2).sum()
        noise = noise.after([Comparison(float(s), float(q), k)])
    assert noise.variance == pytest.approx(50 * deviation**2, rel=0.05)
    assert noise.squared_gradient == pytest.approx(50 * mean**2, rel=0.1)
    assert noise.after([Comparison(5.0, 4.0, 2)] * 1000).samples == pytest.approx(16 * 2 / 3, rel=1e-2)


def test_ranks_sums_are_what_one_of_all_comparisons_is() -> None:
    start, found = known(100.0), [BY_HAND, Comparison(7.0, 2.0, 3), Comparison(1.0, 0.5, 2)]
    sums = [start.sums(found[:1]), start.sums(found[1:])]
    together = start.after_sums(*(sum(each) for each in zip(*sums, strict=True)))  # type: ignore[arg-type]
    assert together == start.after(found)
    assert start.after([]) == start


@given(st.floats(0, 1e6), st.integers(1, 512), st.integers(1, 64))
def test_gain_rises_with_learners_from_one_to_at_most_their_number(scale: float, batch: int, k: int) -> None:
    value = efficiency(scale, batch, k)
    assert efficiency(scale, batch, 1) == 1
    assert 1 / k - 1e-12 <= value <= 1
    assert (k + 1) * efficiency(scale, batch, k + 1) >= k * value - 1e-9


def test_plain_values_come_back() -> None:
    plain = json.loads(json.dumps(known(3.5).to_plain()))
    assert NoiseScale.from_plain(plain) == known(3.5)
    with pytest.raises(TypeError):
        NoiseScale.from_plain({**plain, "count": "many"})


def test_one_learner_is_compared_seldom_once_enough_is_known() -> None:
    assert [index for index in range(70) if compares_in(index, 1, 16)] == [0, 32, 64]
    assert [index for index in range(10) if compares_in(index, 1, 15)] == [0, 4, 8]
    assert [index for index in range(10) if compares_in(index, 3, 100)] == [0, 4, 8]


def test_halves_of_a_batch_show_what_whole_batches_do() -> None:
    """By samples' gradients N(G, σ²) of P values: |G|² = P·G² and tr(Σ) = P·σ²."""
    rng, b, num_values = np.random.default_rng(0), 8, 50
    batches = 0.5 + 2.0 * rng.standard_normal((20_000, b, num_values))
    halves = batches.reshape(len(batches), 2, b // 2, num_values).mean(2)
    squares = (halves**2).sum(2).mean(1), (halves.mean(1) ** 2).sum(1)
    found = [Comparison.of_halves(float(s), float(q)) for s, q in zip(*squares, strict=True)]
    variance, squared, count = NoiseScale(b).sums(found)
    assert variance / count == pytest.approx(num_values * 4.0, rel=0.01)
    assert squared / count == pytest.approx(num_values * 0.25, rel=0.02)


def by_numpy(gradients: list[list[torch.Tensor]]) -> Comparison:
    rows = np.stack([torch.cat([part.flatten() for part in own]).double().numpy() for own in gradients])
    return Comparison(float((rows**2).sum(1).mean()), float((rows.mean(0) ** 2).sum()), len(rows))


def follow(tasks, runner, num_rounds: int = 6) -> list[Comparison | None]:  # type: ignore[no-untyped-def]
    return [outcome.comparison for outcome in run(runner, tasks, num_rounds)]


@pytest.mark.parametrize(
    ("executor", "precision", "tolerance", "optimizer", "rule"),
    [
        pytest.param(executor, *precision, optimizer, rule, marks=marks)
        for (executor, precision, optimizer, rule), marks, _ in pairs(
            ["serial", "threads", "fused", "fused_threads"],
            [(FP64, 1e-10), (FP32, 1e-3)],
            [SGD(), Muon()],
            [SMA(), Crossbow(), SynchronousSGD(), GroupedSMA(group_size=2)],
            quick=8,
        )
    ],
)
def test_executors_compare_the_gradients_of_their_round(
    executor: str, precision: Precision, tolerance: float, optimizer: Optimizer, rule: AveragingRule
) -> None:
    options = {"num_learners": 3, "optimizer": optimizer, "rule": rule, "data": features(64, (3, 6, 6))}
    tasks = make_tasks(small_model, precision=precision, order=EXECUTORS[executor].ORDER, compares=True, **options)
    found = follow(tasks, EXECUTORS[executor](tasks))
    expected = plainly(make_tasks(small_model, **options), 6)
    assert [each is not None for each in found] == [True, False, False, False, True, False]
    for index in (0, 4):
        assert found[index] == pytest.approx(expected[index], rel=tolerance)


def plainly(tasks, num_rounds: int) -> list[Comparison]:  # type: ignore[no-untyped-def]
    """From gradients that are taken apart from the rounds, one learner after another."""
    found, body = [], tasks.learn

    def learn(learner, outcome):  # type: ignore[no-untyped-def]
        body(learner, outcome)
        seen.append([part.clone() for part in tasks.bank.gradients.trained(learner)])

    tasks.learn = learn
    seen: list[list[torch.Tensor]] = []
    run(EXECUTORS["serial"](tasks), tasks, num_rounds)
    k = tasks.bank.num_learners
    for index in range(num_rounds):
        found.append(by_numpy(seen[index * k : (index + 1) * k]))
    return found


@pytest.mark.parametrize("model", [norm_model, norm_with_dropout])
def test_single_learner_is_compared_by_halves_of_a_batch_and_stays_as_it_is(model: Callable[[], nn.Module]) -> None:
    tasks = make_tasks(model, num_learners=1, data=IMAGES, batch_size=6)
    bank, batch = tasks.bank, tasks.feed.batch(0)
    bank.generators[0].manual_seed(5)
    before = {name: own.clone() for name, own in bank.learner_state(0).items()}
    draws = bank.generators[0].get_state(), torch.random.get_rng_state()
    found = tasks.compare_halves(0, batch)
    assert all(torch.equal(own, before[name]) for name, own in bank.learner_state(0).items())
    assert torch.equal(torch.random.get_rng_state(), draws[1])
    bank.generators[0].set_state(draws[0])
    rows = []
    for part in (slice(3), slice(3, 6)):
        output = bank.module(0)(batch.inputs[part])
        loss = nn.functional.cross_entropy(output, batch.targets[part])
        rows.append(list(torch.autograd.grad(loss, bank.trained_parameters(0))))
    s, q, _ = by_numpy(rows)
    assert found == pytest.approx((q, (3 * q - s) / 2, 2), rel=1e-9)
    assert tasks.compare_halves(0, Batch(batch.inputs[:3], batch.targets[:3])) is None


class OneOfTwo(nn.Module):
    """Takes another layer for inputs that begin with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        layer: nn.Module = self.one if inputs[0, 0] > 0 else self.other
        return layer(inputs)  # type: ignore[no-any-return]


def test_weights_that_one_half_does_not_use_count_as_zero() -> None:
    inputs, targets = features(4)
    inputs[:2, 0], inputs[2:, 0] = 1.0, -1.0
    tasks = make_tasks(OneOfTwo, num_learners=1, data=(inputs, targets))
    found = tasks.compare_halves(0, Batch(inputs.double(), targets))
    rows, module = [], tasks.bank.module(0)
    for part in (slice(2), slice(2, 4)):
        loss = nn.functional.cross_entropy(module(inputs[part].double()), targets[part])
        own = torch.autograd.grad(loss, tasks.bank.trained_parameters(0), allow_unused=True, materialize_grads=True)
        rows.append(list(own))
    s, q, _ = by_numpy(rows)
    assert found == pytest.approx((q, (3 * q - s) / 2, 2), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("executor", [FusedExecutor, StreamsExecutor])
@pytest.mark.parametrize("rule", [SMA(), SynchronousSGD(), GroupedSMA(group_size=2)], ids=lambda rule: rule.NAME)
@pytest.mark.parametrize(("num_learners", "num_devices"), [(2, 1), (3, 1), (2, 2)])
def test_devices_compare_in_any_order_that_events_allow(  # type: ignore[no-untyped-def]
    executor, rule, num_learners: int, num_devices: int
) -> None:
    def made() -> RoundTasks:
        options = {"num_learners": num_learners, "rule": rule, "data": IMAGES, "compares": True, "order": "blocks"}
        tasks = make_tasks(norm_model, **options)  # type: ignore[arg-type]
        tasks.bank.num_devices = num_devices
        return tasks

    reference = made()
    expected = follow(reference, EXECUTORS["serial"](reference), 14)
    for seed in range(3):
        ours = made()
        found = follow(ours, executor(ours, ShuffledStreams(seed)), 14)
        assert [each is None for each in found] == [each is None for each in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == (None if theirs is None else pytest.approx(theirs, rel=1e-8))


def test_comparing_changes_nothing_that_is_learned() -> None:
    one, other = (make_tasks(norm_model, num_learners=3, data=IMAGES, compares=compares) for compares in (True, False))
    for tasks in (one, other):
        run(EXECUTORS["threads"](tasks), tasks, 8)
    assert torch.equal(one.bank.weights.storage, other.bank.weights.storage)
