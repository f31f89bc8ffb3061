"""Statistics of learning against exact counts and solutions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from crossbow_py.train.evaluation.learning_statistics import (
    GradientNoise,
    agreement,
    gradient_noise,
    largest_eigenvalue,
)

ENDLESS = 10**15  # samples


def symmetric(eigenvalues: list[float]) -> torch.Tensor:
    """Return a randomly rotated matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(1)
    n = len(eigenvalues)
    turned, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return turned @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ turned.T


def start(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_noise_of_two_batches_out_of_an_endless_set_is_as_worked_out_by_hand():
    # tr(Σ) = (2 − 1.5) / (1/2 − 1/4) = 2 and |G|² = 1.5 − 2/4 = 1: the paper's (4·1.5 − 2·2) / (4 − 2).
    noise = gradient_noise([1.0, 3.0], 1.5, batch_size=2, num_samples=ENDLESS)
    assert (noise.variance, noise.squared_norm) == (pytest.approx(2.0), pytest.approx(1.0))
    assert noise.scale_samples == pytest.approx(2.0)


@pytest.mark.parametrize(("n", "b"), [(2, 1), (4, 1), (2, 2), (5, 1)])
def test_noise_estimates_are_right_on_average_over_all_choices_of_batches(n, b):
    gradients = torch.tensor([[1.0, 0.0], [3.0, -1.0], [0.5, 2.0], [4.0, 4.0], [-2.0, 1.0]], dtype=torch.float64)
    mean = gradients.mean(0)
    variance = float((gradients - mean).square().sum()) / 4
    estimates = []
    for chosen in itertools.permutations(range(5), n * b):
        batches = gradients[list(chosen)].view(n, b, 2).mean(1)
        squared_norms = batches.square().sum(1).tolist()
        estimates.append(gradient_noise(squared_norms, float(batches.mean(0).square().sum()), b, 5))
    count = len(estimates)
    assert sum(each.variance for each in estimates) / count == pytest.approx(variance, rel=1e-10)
    assert sum(each.squared_norm for each in estimates) / count == pytest.approx(float(mean.square().sum()), rel=1e-10)


@pytest.mark.parametrize("squared_norm", [0.0, -1e-9, math.nan])
def test_noise_scale_is_none_where_noise_hides_the_gradient(squared_norm):
    assert GradientNoise(1.0, squared_norm).scale_samples is None


def test_noise_scale_is_zero_where_all_gradients_are_equal():
    assert gradient_noise([4.0, 4.0, 4.0], 4.0, 8, 100) == GradientNoise(0.0, 4.0)


def test_agreement_is_the_mean_over_pairs_counted_by_hand():
    predictions = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0], [0, 2, 1, 3]])
    # 3/4 between the first two, 2/4 between first and third, 1/4 between second and third.
    assert agreement(predictions) == pytest.approx((3 + 2 + 1) / 4 / 3)
    assert agreement(predictions[[0, 0]]) == 1.0


def test_agreement_without_a_pair_or_samples_is_none():
    assert agreement(torch.zeros(1, 4)) is None
    assert agreement(torch.zeros(2, 0)) is None


@pytest.mark.parametrize(
    "eigenvalues",
    [
        [3.0, 1.0, 0.5, 0.1, 0.0, -0.2],
        [-9.0, -3.0, 0.0, 0.5, 2.0],  # by magnitude the first one would be found
        [-4.0, -2.0, -1.0],
        [5.0, 4.99, 4.98, 1.0, 0.0, 0.0, 0.0],
        [2.0],
        [1.5] * 4,
        [0.001 * i for i in range(99)] + [3.0],
    ],
)
def test_largest_eigenvalue_is_that_of_the_whole_matrix(eigenvalues):
    matrix = symmetric(eigenvalues)
    found = largest_eigenvalue(lambda v: matrix @ v, start(len(eigenvalues)))
    expected = float(torch.linalg.eigvalsh(matrix)[-1])
    assert found == pytest.approx(expected, rel=0.01)
    assert found <= expected + 1e-12


def test_largest_eigenvalue_of_a_spread_spectrum_takes_few_products():
    matrix, products = symmetric([10.0] + [i / 500 for i in range(500)]), 0

    def product(v):
        nonlocal products
        products += 1
        return matrix @ v

    assert largest_eigenvalue(product, start(501), tolerance=1e-3) == pytest.approx(10.0, rel=1e-5)
    assert products <= 6


def test_largest_eigenvalue_stops_at_the_most_products():
    matrix, products = symmetric([i / 300 for i in range(300)]), 0

    def product(v):
        nonlocal products
        products += 1
        return matrix @ v

    found = largest_eigenvalue(product, start(300), most_products=4, tolerance=0.0)
    assert products == 4
    assert 0.8 < found <= 299 / 300


def test_largest_eigenvalue_of_zero_is_zero_and_of_what_is_not_finite_nan():
    assert largest_eigenvalue(torch.zeros_like, start(5)) == 0.0
    assert math.isnan(largest_eigenvalue(lambda v: v * math.inf, start(5)))
