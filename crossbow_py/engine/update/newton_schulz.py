"""Orthogonalisation of matrices by Newton–Schulz iterations, as Muon does (Jordan et al. 2024).

A matrix G = U·S·Vᵀ is divided by its Frobenius norm, which brings its singular values to [0, 1], and goes through

    X ← a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X

some times. X keeps U and V, and each singular value s becomes a·s + b·s³ + c·s⁵. With the coefficients below, values
from about 0.01 on are near 1 (in [0.68, 1.14]) after five iterations, which serves as well as 1 itself and takes
fewer iterations than a polynomial that converges to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
_OF_ONE_GRAM = 5  # iterations before the Gram matrix is computed anew
_LEAST_NORM = 1e-7  # a matrix of zeros stays one


def orthogonalize(matrices: Sequence[Tensor], iterations: int) -> list[Tensor]:
    """Return matrices `[rows, columns]` with singular values near 1, in new memory.

    Those of one shape go through one product. The iterations are in the dtype of the matrices.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        rows, columns = matrix.shape
        by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(index)
    found: list[Tensor] = [torch.empty(0)] * len(matrices)
    for shape, indices in by_shape.items():
        wide = [each if each.shape == shape else each.T for each in (matrices[index] for index in indices)]
        # The stack has no name here, so that it is freed with the first iterate.
        for index, own in zip(indices, _iterate(torch.stack(wide), iterations), strict=True):
            found[index] = own if own.shape == matrices[index].shape else own.T
    return found


def _iterate(x: Tensor, iterations: int) -> Tensor:
    """Return the iterates of wide matrices `[N, rows, columns]`; `x` is scratch.

    An iteration multiplies X from the left by a polynomial of its Gram matrix XXᵀ. For wide matrices a few of these
    polynomials are multiplied with each other, `[N, rows, rows]`, and then with X; for others X itself is iterated.
    Only a few, because what rounding adds to a Gram matrix of low rank grows by a factor of 12 in an iteration.
    """
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float64)  # squares may overflow float32
    x /= norms.clamp_(min=_LEAST_NORM).to(x.dtype)
    if 2 * x.shape[2] < 3 * x.shape[1]:
        for _ in range(iterations):
            x = torch.baddbmm(x, _polynomial(torch.bmm(x, x.mT)), x, beta=COEFFICIENTS[0])
        return x
    for first in range(0, iterations, _OF_ONE_GRAM):
        x = torch.bmm(_product(torch.bmm(x, x.mT), min(_OF_ONE_GRAM, iterations - first)), x)
    return x


def _product(gram: Tensor, iterations: int) -> Tensor:
    """Return the product of the polynomials that X is multiplied by in these iterations, at least one."""
    product = factor = _factor(gram)
    for _ in range(1, iterations):
        gram = torch.bmm(torch.bmm(factor, gram), factor)
        factor = _factor(gram)
        product = torch.bmm(factor, product)
    return product


def _factor(gram: Tensor) -> Tensor:
    """Return a + b·G + c·G²."""
    factor = _polynomial(gram)
    factor.diagonal(dim1=1, dim2=2).add_(COEFFICIENTS[0])
    return factor


def _polynomial(gram: Tensor) -> Tensor:
    """Return b·G + c·G²."""
    return torch.baddbmm(gram, gram, gram, beta=COEFFICIENTS[1], alpha=COEFFICIENTS[2])
