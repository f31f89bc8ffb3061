"""SMA by numbers worked out by hand, and its invariants. `test_rules.py` has it against NumPy."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.averaging import SMA, Stage
from crossbow_py.engine.update.optimizers import SGD
from tests.support import features, make_tasks, run_rounds


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
