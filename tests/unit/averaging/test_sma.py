"""SMA against NumPy in float64, and its invariants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from crossbow_py.averaging import SMA, Independent, Stage
from crossbow_py.core.errors import UserError
from crossbow_py.engine.update.optimizers import SGD
from tests.support import features, linear_model, make_tasks, run_rounds


def numpy_sma(num_learners, num_rounds, *, lr, momentum, decay, alpha, mu, period=1, batch=4, feed=None):
    """The equations of the design, written out for softmax regression with hand-derived gradients."""
    model = linear_model()
    z = [model.weight.detach().double().numpy().copy(), model.bias.detach().double().numpy().copy()]
    z_prev = [value.copy() for value in z]
    w = [[value.copy() for value in z] for _ in range(num_learners)]
    u = [[np.zeros_like(value) for value in z] for _ in range(num_learners)]
    for n in range(num_rounds):
        averages = (n + 1) % period == 0
        total = [np.zeros_like(value) for value in z]
        for j in range(num_learners):
            inputs, targets = feed.batch((n * num_learners + j) * batch)
            x, y = inputs.numpy(), targets.numpy()
            logits = x @ w[j][0].T + w[j][1]
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(batch), y] -= 1
            gradient = [p.T @ x / batch, p.sum(0) / batch]
            correction = [alpha * (a - b) if averages else np.zeros_like(a) for a, b in zip(w[j], z, strict=True)]
            for i in range(2):
                g = gradient[i] + (decay * w[j][i] if i == 0 else 0)  # the bias is not decayed
                u[j][i] = momentum * u[j][i] + g
                w[j][i] = w[j][i] - lr * u[j][i] - correction[i]
                total[i] += correction[i]
        if averages:
            new = [z[i] + total[i] + mu * (z[i] - z_prev[i]) for i in range(2)]
            z_prev, z = z, new
    return z


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize(("num_learners", "period"), [(2, 1), (3, 1), (3, 2)])
def test_sma_after_ten_rounds_with_momentum_and_decay_equals_numpy(executor, num_learners, period):
    rule = SMA(averaging_period=period)
    tasks = make_tasks(num_learners=num_learners, optimizer=SGD(momentum=0.8, weight_decay=0.01), rule=rule)
    run_rounds(tasks, executor, 10, learning_rate=0.3)
    expected = numpy_sma(
        num_learners, 10, lr=0.3, momentum=0.8, decay=0.01, alpha=1 / num_learners, mu=0.9, period=period,
        feed=tasks.feed,
    )  # fmt: skip
    z = tasks.bank.z.shaped()
    np.testing.assert_allclose(z["weight"].numpy(), expected[0], rtol=1e-12)
    np.testing.assert_allclose(z["bias"].numpy(), expected[1], rtol=1e-12)


def test_sma_two_learners_one_weight_follows_numbers_worked_by_hand():
    # w = 1 and 3, z = z_prev = 2 − 1 = 1, α = 0.5, μ = 0.9, no gradient:
    # c = 0 and 1; w' = 1 and 2; z' = 1 + 1 + 0 = 2. Next: c = −0.5 and 0; z'' = 2 − 0.5 + 0.9·(2 − 1) = 2.4.
    rule, w = SMA(correction_rate=0.5), [torch.tensor([1.0]), torch.tensor([3.0])]
    z, z_prev = torch.tensor([1.0]), torch.tensor([1.0])
    for expected_w, expected_z in (([1.0, 2.0], 2.0), ([1.5, 2.0], 2.4)):
        coefficients = rule.round(Stage(0, 2))
        corrections = [torch.zeros(1), torch.zeros(1)]
        for weight, correction in zip(w, corrections, strict=True):
            rule.corrections([correction], [weight], [z], coefficients)
            weight.sub_(correction)
        rule.average([z], [z_prev], [corrections[0] + corrections[1]], coefficients)
        assert [float(value) for value in w] == expected_w
        assert float(z) == pytest.approx(expected_z)


def test_sma_without_gradient_and_central_momentum_conserves_the_sum():
    tasks = make_tasks(num_learners=3, optimizer=SGD(momentum=0.0), rule=SMA(correction_rate=0.2, averaging_momentum=0))
    bank = tasks.bank
    bank.weights.storage.copy_(torch.randn_like(bank.weights.storage))
    before = bank.stacked()["weight"].sum(0) + bank.z.shaped()["weight"]
    run_rounds(tasks, "serial", 7, learning_rate=0.0)
    after = bank.stacked()["weight"].sum(0) + bank.z.shaped()["weight"]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_sma_with_rate_one_over_k_and_no_central_momentum_makes_z_the_mean_of_the_replicas():
    tasks = make_tasks(num_learners=4, optimizer=SGD(momentum=0.9), rule=SMA(averaging_momentum=0.0))
    run_rounds(tasks, "serial", 3)
    mean_before = tasks.bank.stacked()["weight"].mean(0)
    tasks.bank.z_prev.copy_row(0, tasks.bank.z)
    run_rounds(tasks, "serial", 1)
    torch.testing.assert_close(tasks.bank.z.shaped()["weight"], mean_before, rtol=1e-12, atol=1e-12)


def test_sma_rate_follows_the_number_of_learners_unless_set():
    assert SMA().round(Stage(0, 4)).correction == 0.25
    assert SMA(correction_rate=0.1).round(Stage(0, 4)).correction == 0.1


def test_sma_with_one_learner_averages_nothing():
    assert SMA().round(Stage(0, 1)) is None


def test_sma_with_period_three_averages_every_third_round():
    assert [SMA(averaging_period=3).round(Stage(n, 2)) is not None for n in range(6)] == [False, False, True] * 2


def test_independent_never_averages_and_learners_keep_apart():
    assert Independent().round(Stage(0, 4)) is None


@pytest.mark.parametrize(
    ("field", "value"), [("correction_rate", 0.0), ("averaging_momentum", 1.0), ("averaging_period", 0)]
)
def test_sma_outside_its_limits_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=f"averaging.{field} must be"):
        SMA(**{field: value})


def test_feed_used_by_the_reference_is_the_one_learners_use():
    inputs, targets = features(64)
    batch = make_tasks().feed.batch(0)
    rows = [int((inputs == row.float()).all(1).nonzero()) for row in batch.inputs]
    assert targets[rows].tolist() == batch.targets.tolist()


@pytest.mark.parametrize(
    ("period", "node_period", "joining"),
    [
        (1, 1, []),  # nodes are never apart
        (1, 2, [1, 3, 5, 7, 9, 11]),
        (1, 5, [4, 9]),
        (3, 2, [5, 11]),  # of the rounds 2, 5, 8, 11 that average, every second
        (2, 3, [5, 11]),
    ],
)
def test_joins_nodes_in_every_so_many_of_the_rounds_that_average(period, node_period, joining):
    rule = SMA(averaging_period=period, node_period=node_period)
    averages = [index for index in range(12) if rule.round(Stage(index, 4)) is not None]
    assert averages == list(range(period - 1, 12, period))
    assert [index for index in averages if rule.joins_nodes(index)] == joining


def test_node_period_below_one_is_refused():
    with pytest.raises(UserError, match=r"averaging\.node_period must be at least 1, got 0"):
        SMA(node_period=0)
