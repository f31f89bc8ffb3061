"""SMA, ours and Crossbow's, by numbers worked out by hand, and its invariants. `test_rules.py` has it against NumPy."""

from __future__ import annotations

import pytest
import torch

from crossbow_py.averaging import SMA, Crossbow, Stage
from crossbow_py.engine.update.optimizers import SGD
from tests.support import make_tasks, run_rounds


def by_hand(rule, num_rounds):
    """Replicas and z after each round without gradients, from w = 1 and 3 and z = z_prev = 1."""
    w, z, z_prev = [torch.tensor([1.0]), torch.tensor([3.0])], torch.tensor([1.0]), torch.tensor([1.0])
    for index in range(num_rounds):
        coefficients, moved = rule.round(Stage(index, 2)), []
        for weight in w:
            correction = torch.zeros(1)
            rule.corrections([correction], [weight], [z], coefficients)
            weight.sub_(correction)
            moved.append(weight - z if coefficients.follows_learners else correction)
        rule.average([z], [z_prev], [coefficients.share * (moved[0] + moved[1])], coefficients)
        yield [*map(float, w)], float(z)


def test_two_learners_of_one_weight_follow_numbers_worked_by_hand():
    # c = 0 and 1, w = 1 and 2, z = 1.5. Next: c = −0.25 and 0.25, w = 1.25 and 1.75, and z stays.
    assert list(by_hand(SMA(correction_rate=0.5), 2)) == [([1.0, 2.0], 1.5), ([1.25, 1.75], 1.5)]
    assert list(by_hand(SMA(), 2)) == [([1.0, 1.0], 1.0), ([1.0, 1.0], 1.0)]


def test_two_learners_by_crossbow_follow_numbers_worked_by_hand():
    # α = 0.5, μ = 0.9: c = 0 and 1; w = 1 and 2; z = 1 + 1. Next: c = −0.5 and 0; z = 2 − 0.5 + 0.9·(2 − 1) = 2.4.
    assert list(by_hand(Crossbow(correction_rate=None), 2)) == [([1.0, 2.0], 2.0), ([1.5, 2.0], pytest.approx(2.4))]


@pytest.mark.parametrize("rule", [SMA(), SMA(correction_rate=0.3)])
def test_mean_of_learners_moves_as_if_gradients_were_averaged(rule):
    """On a quadratic, where the mean of gradients is the gradient at the mean, z is plain SGD whatever the pull."""
    w, u, h = torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0.3
    z = mean = w.mean()
    velocity = torch.zeros((), dtype=torch.float64)
    for _ in range(30):
        u = 0.9 * u + h * w
        w = w - 0.1 * u - rule.correction_rate * (w - z)
        z = w.mean()
        velocity = 0.9 * velocity + h * mean
        mean = mean - 0.1 * velocity
        torch.testing.assert_close(z, mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("executor", ["serial", "threads", "fused"])
def test_average_model_is_the_mean_of_the_replicas_in_every_round(executor):
    tasks = make_tasks(num_learners=3, optimizer=SGD(momentum=0.9), rule=SMA(correction_rate=0.4))
    for _ in range(4):
        run_rounds(tasks, executor, 1)
        for name, stacked in tasks.bank.stacked().items():
            torch.testing.assert_close(tasks.bank.z.shaped()[name], stacked.mean(0), rtol=1e-12, atol=1e-12)


def test_crossbow_without_gradient_and_central_momentum_conserves_the_sum():
    rule = Crossbow(correction_rate=0.2, averaging_momentum=0)
    tasks = make_tasks(num_learners=3, optimizer=SGD(momentum=0.0), rule=rule)
    bank = tasks.bank
    bank.weights.storage.copy_(torch.randn_like(bank.weights.storage))
    before = bank.stacked()["weight"].sum(0) + bank.z.shaped()["weight"]
    run_rounds(tasks, "serial", 7, learning_rate=0.0)
    after = bank.stacked()["weight"].sum(0) + bank.z.shaped()["weight"]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_crossbow_of_rate_one_over_k_without_momentum_has_z_a_round_behind_the_mean():
    rule = Crossbow(correction_rate=None, averaging_momentum=0.0)
    tasks = make_tasks(num_learners=4, optimizer=SGD(momentum=0.9), rule=rule)
    run_rounds(tasks, "serial", 3)
    mean_before = tasks.bank.stacked()["weight"].mean(0)
    tasks.bank.z_prev.copy_row(0, tasks.bank.z)
    run_rounds(tasks, "serial", 1)
    torch.testing.assert_close(tasks.bank.z.shaped()["weight"], mean_before, rtol=1e-12, atol=1e-12)


def test_crossbow_rate_follows_the_number_of_learners_if_it_is_null():
    assert Crossbow(correction_rate=None).round(Stage(0, 4)).correction == 0.25
    assert Crossbow().round(Stage(0, 4)).correction == 0.1


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
    apart = {index: index % period + 1 for index in range(12)}
    found = {index: rule.round(Stage(index, 4, rounds_apart=apart[index])) for index in range(12)}
    averages = [index for index, each in found.items() if each is not None and each.moves_z]
    assert averages == list(range(period - 1, 12, period))
    assert [index for index in averages if rule.joins_nodes(index)] == joining
