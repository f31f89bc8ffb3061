"""The linear analysis of SMA on a quadratic, and that the engine follows it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from crossbow_py.averaging import (
    SMA,
    SNOO,
    Crossbow,
    DiLoCo,
    Elastic,
    GroupedSMA,
    Independent,
    LocalSGD,
    SlowMo,
    Stage,
)
from crossbow_py.averaging.stability import check_settles, most_stable_learners, outer_margin
from crossbow_py.core.errors import UserError
from crossbow_py.engine.bank.layout import TrainedRow
from crossbow_py.engine.update.optimizers import SGD


def spectral_radius(curvature, momentum, alpha, mu, num_learners):
    """Of the recurrence of (w, γu, z, z_prev) when all learners agree; `curvature` is γh."""
    matrix = np.array(
        [
            [1 - curvature - alpha, -momentum, alpha, 0],
            [curvature, momentum, 0, 0],
            [num_learners * alpha, 0, 1 - num_learners * alpha + mu, -mu],
            [0, 0, 1, 0],
        ]
    )
    return float(max(abs(np.linalg.eigvals(matrix))))


@pytest.mark.parametrize(
    ("rule", "most"),
    [
        (Crossbow(), 36), (Crossbow(correction_rate=0.2), 17), (Crossbow(correction_rate=0.5), 5),
        (Crossbow(averaging_momentum=0.0), 18), (Elastic(correction_rate=0.3), 5),
        (Crossbow(correction_rate=0.5, averaging_period=7, quadratic_period=0.1), 5),
        (Crossbow(correction_rate=0.5, final_correction_rate=0.9), 99), (Crossbow(correction_rate=None), 99),
        (SMA(), 99), (SMA(correction_rate=0.01), 99), (GroupedSMA(), 99), (LocalSGD(), 99), (Independent(), 99),
    ],
)  # fmt: skip
def test_learners_that_stand_still_settle_up_to_a_number_by_any_pull(rule, most):
    assert most_stable_learners(rule, 99) == most
    check_settles(rule, most)
    if most < 99:
        with pytest.raises(UserError, match=rf"correction_rate=0\.\d+ is too large .* with more than {most} learners"):
            check_settles(rule, most + 1)
        assert distance_apart(rule, most) < 1e-3
        assert distance_apart(rule, most + 1) > 1 - 1e-9


@pytest.mark.parametrize(
    ("rule", "bound"),
    [
        (DiLoCo(outer_momentum=0.9), 3.8 / 2.8), (DiLoCo(outer_momentum=0.5), 1.5), (SNOO(outer_momentum=0.0), 2.0),
        (SlowMo(slow_momentum=0.7), 3.4),
    ],
)  # fmt: skip
def test_an_outer_step_settles_up_to_a_rate_by_any_momentum(rule, bound):
    name = "slow_learning_rate" if isinstance(rule, SlowMo) else "outer_learning_rate"
    assert outer_margin(dataclasses.replace(rule, **{name: 0.5 * bound})) == pytest.approx(2)
    assert outer_distance(dataclasses.replace(rule, **{name: 0.99 * bound})) < 0.1
    assert outer_distance(dataclasses.replace(rule, **{name: 1.01 * bound})) > 10
    assert outer_margin(SMA()) == math.inf


def outer_distance(rule, steps=600):
    """|z| after so many outer steps from 1 of learners that get to 0 between any two."""
    z, z_velocity = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    period = rule.averaging_period
    for step in range(steps):
        round_index = (step + 1) * period - 1
        found = rule.round(Stage(round_index, 4, learning_rate=0.1, rounds_apart=period))
        mean_step = -z
        z_velocity = found.decay * z_velocity + found.intake * mean_step
        z = z + found.along_velocity * z_velocity + found.along_mean * mean_step
    return float(z.abs())


def distance_apart(rule, num_learners, rounds=300):
    """|w − z| after so many rounds without gradients from a distance of 1; one learner stands for all, which agree."""
    found = rule.linear_round(num_learners)
    w, z, z_prev = 1.0, 0.0, 0.0
    for _ in range(rounds):
        correction = found.correction * (w - z)
        w, z, z_prev = w - correction, z + num_learners * correction + found.momentum * (z - z_prev), z
    return abs(w - z)


def test_learners_of_all_devices_count():
    assert most_stable_learners(Crossbow(), 99, num_devices=8) == 4
    with pytest.raises(UserError, match="for 8 learners on each of 8 devices: with more than 4 "):
        check_settles(Crossbow(), 8, num_devices=8)


@pytest.mark.parametrize(
    ("curvature", "alpha", "stable"),
    [(0.1, 0.5, True), (0.5, 0.5, False), (1.0, 0.5, False), (0.5, 0.1, True), (1.0, 0.1, True), (3.0, 0.1, True)],
)
def test_two_learners_with_both_momenta_are_stable_where_the_radius_says(curvature, alpha, stable):
    assert (spectral_radius(curvature, 0.9, alpha, 0.9, 2) < 1) is stable
    assert (final_distance(curvature, alpha) < 1) is stable


@pytest.mark.parametrize(("num_learners", "curvature"), [(2, 0.25), (4, 0.39), (8, 0.59), (16, 0.84)])
def test_two_momenta_bound_the_curvature_that_crossbow_can_take(num_learners, curvature):
    """As docs/architecture.md has it, for m = μ = 0.9 and α = 1/K."""
    assert spectral_radius(curvature - 0.01, 0.9, 1 / num_learners, 0.9, num_learners) < 1
    assert spectral_radius(curvature + 0.01, 0.9, 1 / num_learners, 0.9, num_learners) > 1


def final_distance(curvature, alpha, rounds=400):
    """|z| after running rule and optimizer on f(w) = w²/2 with γ = curvature, from w = z = 1."""
    rule, optimizer = Crossbow(correction_rate=alpha), SGD(momentum=0.9)
    weights = [torch.ones(1, dtype=torch.float64) for _ in range(2)]
    z, z_prev = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    state = [{"momentum": [torch.zeros(1, dtype=torch.float64)]} for _ in weights]
    for n in range(rounds):
        coefficients, total = rule.round(Stage(n, 2)), torch.zeros(1, dtype=torch.float64)
        for learner, weight in enumerate(weights):
            correction = torch.zeros(1, dtype=torch.float64)
            rule.corrections([correction], [weight], [z], coefficients)
            row = TrainedRow([weight], [weight.clone()], [], state[learner], [], None, num_decayed=1)
            optimizer.step(learner, row, learning_rate=curvature, step_count=n + 1)
            weight.sub_(correction)
            total += correction
        rule.average([z], [z_prev], [total], coefficients)
    return float(z.abs())


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_learners_stay_together_by_sma_up_to_a_curvature(alpha, momentum):
    """Distances from the mean vanish if and only if γh < (1 + m)·(2 − α); the mean itself is plain SGD's."""
    bound = (1 + momentum) * (2 - alpha)
    for curvature, stable in ((0.99 * bound, True), (1.01 * bound, False)):
        # (e, γv): v ← m·v + h·e, then e ← (1 − α)·e − γ·v
        matrix = np.array([[1 - alpha - curvature, -momentum], [curvature, momentum]])
        assert bool(max(abs(np.linalg.eigvals(matrix))) < 1) is stable
