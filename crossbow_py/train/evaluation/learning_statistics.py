"""Statistics of learning as functions of values: gradient noise scale, agreement of predictions, sharpness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientNoise:
    """The noise of gradients: the spread of single samples' gradients around their mean G.

    Attributes:
        variance: tr(Σ), the sum over parameters of the variance of a sample's gradient.
        squared_norm: |G|². An unbiased estimate, so it may be negative if noise hides G.
    """

    variance: float
    squared_norm: float

    @property
    def scale_samples(self) -> float | None:
        """B_simple = tr(Σ) / |G|²: with fewer samples, noise outweighs the gradient. None unless |G|² > 0."""
        return self.variance / self.squared_norm if self.squared_norm > 0 else None


def gradient_noise(
    squared_norms: Sequence[float], squared_norm_of_mean: float, batch_size: int, num_samples: int
) -> GradientNoise:
    """Estimate tr(Σ) and |G|² from gradients of n batches of b different samples, all at the same weights.

    A batch of B samples out of N, none of them twice, has E|G_B|² = |G|² + tr(Σ)·(1/B − 1/N). With the mean of the
    batches' |G_b|² for B = b, and |G_nb|² for B = n·b, these are two equations::

        tr(Σ) = (|G_b|² − |G_nb|²) / (1/b − 1/nb)
        |G|²  = |G_nb|² − tr(Σ)·(1/nb − 1/N)

    McCandlish et al. 2018, An Empirical Model of Large-Batch Training, appendix A.1, has the case N → ∞.

    Args:
        squared_norms: |G_b|² of each batch, at least two.
        squared_norm_of_mean: |G_nb|², of the mean of their gradients.
        batch_size: b.
        num_samples: N, the samples that the batches are drawn from. The noise that augmentation adds is treated as if
            it averaged out over all N samples.
    """
    n = len(squared_norms)
    assert n > 1, "the noise cannot be estimated from one batch"
    small = math.fsum(squared_norms) / n
    variance = (small - squared_norm_of_mean) / (1 / batch_size - 1 / (n * batch_size))
    return GradientNoise(variance, squared_norm_of_mean - variance * (1 / (n * batch_size) - 1 / num_samples))


def agreement(predictions: Tensor) -> float | None:
    """Return the share of samples on which two learners predict the same class, mean over pairs; None without a pair.

    Args:
        predictions: classes [K, N] on the host.
    """
    k, num_samples = predictions.shape
    if k < 2 or not num_samples:
        return None
    equal = sum(int((predictions[j] == predictions[j + 1 :]).sum()) for j in range(k - 1))
    return equal / (num_samples * k * (k - 1) / 2)


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], start: Tensor, most_products: int = 20, tolerance: float = 0.003
) -> float:
    """Return the largest eigenvalue of a symmetric matrix H, given only its products with vectors.

    This is Lanczos' method: power iteration that uses all products so far, not only the last one. It needs fewer
    products, and finds the largest eigenvalue even if the one of largest magnitude is negative. But for rounding, the
    result is never above the largest eigenvalue; once converged, it is within `tolerance` of an eigenvalue, relative to
    its size.

    Args:
        product: v → H·v, vectors [P].
        start: any vector that is not orthogonal to the eigenvector, such as a random one.
        most_products: the limit on products, converged or not.
        tolerance: of the residual |H·x − λ·x| / |λ|, at which it has converged.

    Returns NaN if a product is not finite. Every product ends in a host–device synchronisation on CUDA.
    """
    direction, before, beta = start / start.norm(), torch.zeros_like(start), 0.0
    tridiagonal = torch.zeros(most_products, most_products, dtype=torch.float64)
    largest = math.nan
    for number in range(most_products):
        left = product(direction) - beta * before
        alpha = float(left.dot(direction))
        left -= alpha * direction
        beta = float(left.norm())
        if not (math.isfinite(alpha) and math.isfinite(beta)):
            return math.nan
        tridiagonal[number, number] = alpha
        values, vectors = torch.linalg.eigh(tridiagonal[: number + 1, : number + 1])
        largest = float(values[-1])
        if beta * abs(float(vectors[-1, -1])) <= tolerance * abs(largest) or number + 1 == most_products:
            break
        tridiagonal[number, number + 1] = tridiagonal[number + 1, number] = beta
        before, direction = direction, left / beta
    return largest
