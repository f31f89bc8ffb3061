"""The linear analysis of SMA on a quadratic, and that the engine follows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from crossbow_py.averaging import SMA, Stage
from crossbow_py.engine.optimizers import SGD


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
    ("curvature", "alpha", "stable"),
    [(0.1, 0.5, True), (0.5, 0.5, False), (1.0, 0.5, False), (0.5, 0.1, True), (1.0, 0.1, True), (3.0, 0.1, True)],
)
def test_two_learners_with_both_momenta_are_stable_where_the_radius_says(curvature, alpha, stable):
    assert (spectral_radius(curvature, 0.9, alpha, 0.9, 2) < 1) is stable
    assert (final_distance(curvature, alpha) < 1) is stable


def final_distance(curvature, alpha, rounds=400):
    """|z| after running rule and optimizer on f(w) = w²/2 with γ = curvature, from w = z = 1."""
    rule, optimizer = SMA(correction_rate=alpha, averaging_momentum=0.9), SGD(momentum=0.9)
    weights = [torch.ones(1, dtype=torch.float64) for _ in range(2)]
    z, z_prev = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    state = [{"momentum": [torch.zeros(1, dtype=torch.float64)]} for _ in weights]
    for n in range(rounds):
        coefficients, total = rule.round(Stage(n, 2)), torch.zeros(1, dtype=torch.float64)
        for learner, weight in enumerate(weights):
            correction = torch.zeros(1, dtype=torch.float64)
            rule.corrections([correction], [weight], [z], coefficients)
            gradient = [weight.clone()]
            optimizer.step(
                learner, [weight], gradient, state[learner], num_decayed=1, learning_rate=curvature, step_count=n + 1
            )
            weight.sub_(correction)
            total += correction
        rule.average([z], [z_prev], [total], coefficients)
    return float(z.abs())
